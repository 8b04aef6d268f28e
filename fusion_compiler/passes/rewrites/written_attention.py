"""Attention that is written out in products becomes one call, for which PyTorch has kernels.

    dropout(softmax(q @ k^T * c + bias)) @ v   ->   sdpa(q, k, v, attn_mask=bias, dropout_p=p, scale=c)

It is recognised however it is written (attention_form.py). The scores are then never stored, and rewrites
after this one prove masks causal. The results stay eager's, also in rows that a mask hides completely:

    scores filled with -inf       NaN, as eager's softmax: the result is multiplied by NaN there
    with a number like -1e9       the mean of v, no gradient to q: the row sees everything by a query of zeros
    a finite additive mask        passed as it is

Rows that are proved to show something (attention_mask.shows_every_row) need none of this. Other readers of
scores or probabilities, arithmetic that attention does not have, and calls for which PyTorch has no fused
kernel are refused, with the reason. On a GPU, attention whose mask no flash kernel takes stays as it is
written, for a nest (masked_attention.py). Inside the call, scores and probabilities are float32.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx

from fusion_compiler.capture.graphs import emit, mutated_nodes, stored_in_order
from fusion_compiler.ir.graph_pass import Pass, Refused
from fusion_compiler.ops.views import Permuted, Reshaped
from fusion_compiler.passes.rewrites.attention_form import SOFTMAXES, Attention, Operand, attention_at
from fusion_compiler.passes.rewrites.attention_mask import shows_every_row, verdict
from fusion_compiler.passes.rewrites.axes import COPIES, Dim, rearrangement, shape_of
from fusion_compiler.passes.rewrites.constants import base_name, values
from fusion_compiler.passes.rewrites.contiguous import shows
from fusion_compiler.passes.rewrites.engine import Nodes, Replacement, Replacements
from fusion_compiler.passes.rewrites.few_queries import capped_attention
from fusion_compiler.passes.rewrites.mask_algebra import expression
from fusion_compiler.passes.rewrites.masked_attention import refusal

_aten = torch.ops.aten
_SDPA = _aten.scaled_dot_product_attention.default
RULE = "fused attention"
MAX_HEAD = 256  # of the flash kernels; above, separate products are not known to be slower
# A score that a mask fills with this or less has the weight 0 beside any other that a model computes.
HIDDEN = -1e8


def _look(node: fx.Node, written: set[fx.Node], leaves_masks: bool) -> Replacement | None:
    attention = attention_at(node)
    if attention is None:
        return None

    def call(nodes: Nodes) -> fx.Node:
        copy = attention_at(nodes[node])
        assert copy is not None
        return _Call(copy, leaves_masks).emitted()

    return Replacement(call, _described(attention), tuple(attention.inside), attention.root)


def _described(attention: Attention) -> str:
    scores = attention.scores
    kind = "an additive mask" if scores.biases else "a bool mask" if scores.fills else "no mask"
    return f"one call, {kind}" + (f", dropout {attention.dropout:g}" if attention.dropout else "")


@dataclass(frozen=True)
class _Mask:
    """The mask of the call, and the rows that it hides completely.

    tensor: bool or additive; None for none. even: rows all of whose scores are filled with one number, which
    take a query of zeros. undefined: rows that are NaN. Both are [batch, heads, rows, 1], or None.
    """

    tensor: fx.Node | None
    even: fx.Node | None
    undefined: fx.Node | None


class _Call:
    """The call that an attention becomes, emitted at the place of the attention's result.

    leaves_masks: an attention becomes no call if a nest computes its mask.
    """

    def __init__(self, attention: Attention, leaves_masks: bool) -> None:
        self.attention, self.leaves_masks = attention, leaves_masks
        self.graph = attention.root.graph
        self.axes = attention.axes
        self.dtype: torch.dtype = attention.products[1].meta["val"].dtype
        self.batch, self.heads = _two(attention, self.axes.now)
        before = (n for n in itertools.takewhile(lambda n: n is not attention.root, self.graph.nodes))
        symbols = [n for n in before if isinstance(n.meta.get("val"), torch.SymInt)]
        self.sizes = {expression(n.meta["val"]): n for n in reversed(symbols)}

    def emitted(self) -> fx.Node:
        """Emit the call at the place of the result, and return it. Raises Refused."""
        form = self.attention
        if form.scores.scale <= 0:
            raise Refused(f"the scores are multiplied by {form.scores.scale:g}")
        query = self._canonical(self._in_dtype(form.query), (form.rows, form.inner))
        key = self._canonical(self._in_dtype(form.key), (form.keys, form.inner))
        value = self._canonical(self._in_dtype(form.value, 1), (form.keys, form.features))
        mask = self._mask()
        reason = no_kernel(query, value, mask.tensor, form.dropout)
        if reason and form.scores.capped is None:
            raise Refused(reason)
        if self.leaves_masks and mask.tensor is not None and self._has_nest(query, key, value, mask.tensor):
            raise Refused("a nest computes its mask")
        if mask.even is not None:
            query = self._emit(_aten.masked_fill.Scalar, query, mask.even, 0.0)
        scale = form.scores.scale
        result = self._emit(_SDPA, query, key, value, mask.tensor, form.dropout, False, scale=scale)
        if form.scores.capped is not None:  # PyTorch has no kernel for capped scores
            result = capped_attention(result, form.scores.capped)
        if mask.undefined is not None:
            factor = self._emit(_aten.where.Scalar, mask.undefined, math.nan, 1.0)
            factor = self._emit(_aten.to.dtype, factor, self.dtype)
            result = self._emit(_aten.mul.Tensor, result, factor)
        result = self._laid_out(result)
        ours, theirs = result.meta["val"], form.root.meta["val"]
        if shape_of(result) != shape_of(form.root) or ours.dtype != theirs.dtype:
            raise Refused(f"the call gives {ours.dtype} of {tuple(ours.shape)}")
        return result

    def _has_nest(self, query: fx.Node, key: fx.Node, value: fx.Node, mask: fx.Node) -> bool:
        """True if a nest computes attention with a mask that is not proved to be causal or all true."""
        if refusal(query, key, value):
            return False
        return verdict(mask, mutated_nodes(self.graph.nodes))[0] is None

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return emit(self.attention.products[1], target, *args, **kwargs)

    # -- operands -------------------------------------------------------------------------------------

    def _in_dtype(self, operand: Operand, product: int = 0) -> Operand:
        """Return a product's operand in the dtype of the call. Raises Refused if that has fewer digits."""
        node = operand.node
        while base_name(node) in ("to", "_to_copy") and _fits(
            node.all_input_nodes[0], node.meta["val"].dtype
        ):
            node = node.all_input_nodes[0]
        multiplied = self.attention.products[product].meta["val"].dtype  # may differ under autocast
        if node.meta["val"].dtype != self.dtype:
            if multiplied != self.dtype and not _fits(node, self.dtype):
                raise Refused(f"products of {multiplied} and of {self.dtype}")
            node = self._emit(_aten.to.dtype, node, self.dtype)
        return Operand(node, operand.layout)

    def _canonical(self, operand: Operand, inner: tuple[Dim, Dim], *, spread_batch: bool = True) -> fx.Node:
        """Emit an operand as [batch, heads, *inner]. spread_batch: expand batch and heads that it lacks."""
        operand, now = _unpermuted(operand), self.axes.now
        node = operand.node
        groups = [now(d) for d in (self.batch, self.heads, *inner)]
        have = [a for d in operand.layout for a in now(d)]
        node = self._reshape(node, [self.axes.size(a) for a in have])
        wanted = [a for group in groups for a in group]
        spread = [
            group if (spread_batch and i < 2) or any(a in have for a in group) else ()
            for i, group in enumerate(groups)
        ]
        order = [have.index(a) for a in wanted if a in have]
        if order != sorted(order):
            node = self._emit(_aten.permute.default, node, order)
        axes = [a for group in spread for a in group]
        if missing := [i for i, a in enumerate(axes) if a not in have]:
            for i in missing:
                node = self._emit(_aten.unsqueeze.default, node, i)
            node = self._emit(_aten.expand.default, node, self._numbers([self.axes.size(a) for a in axes]))
        node = self._reshape(node, [self._size(group) for group in spread])
        # No fused kernel takes rows that are not contiguous.
        return (
            node
            if expression(node.meta["val"].stride(-1)) == 1
            else self._emit(_aten.contiguous.default, node)
        )

    def _laid_out(self, result: fx.Node) -> fx.Node:
        """Emit [batch, heads, rows, features] in the shape and memory order of the attention's result."""
        attention, now = self.attention, self.axes.now
        have = [a for d in (self.batch, self.heads, attention.rows, attention.features) for a in now(d)]
        wanted = [a for d in attention.layout for a in now(d)]
        result = self._reshape(result, [self.axes.size(a) for a in have])
        order = [have.index(a) for a in wanted]
        if order != sorted(order):
            result = self._emit(_aten.permute.default, result, order)
        result = self._reshape(result, list(shape_of(attention.root)))
        return self._in_memory_order(result)

    def _in_memory_order(self, result: fx.Node) -> fx.Node:
        """Emit the result with the strides of eager's, if the graph's results depend on them."""
        value = self.attention.root.meta["val"]
        if value.is_contiguous():
            return self._emit(_aten.contiguous.default, result)
        if not shows(self.attention.root):
            return result
        return stored_in_order(self.attention.products[1], result, value)

    def _reshape(self, node: fx.Node, shape: list[sympy.Expr]) -> fx.Node:
        """Emit `node` in another shape, or return the operand of a reshape before it that has this shape."""
        source = node
        while True:
            if list(shape_of(source)) == shape:
                return source
            keeps_order = source.target in COPIES or isinstance(rearrangement(source), Reshaped)
            if not keeps_order or source in self.attention.inside:
                break
            source = source.all_input_nodes[0]
        return self._emit(_aten.reshape.default, node, self._numbers(shape))

    def _size(self, dim: Dim) -> sympy.Expr:
        return sympy.Mul(*(self.axes.size(a) for a in dim))

    def _numbers(self, shape: list[sympy.Expr]) -> list[Any]:
        numbers: list[Any] = []
        for size in shape:
            if size.is_Integer:
                numbers.append(int(size))
            elif size in self.sizes:
                numbers.append(self.sizes[size])
            else:
                raise Refused(f"no size of the graph is {size}")
        return numbers

    # -- masks ----------------------------------------------------------------------------------------

    def _mask(self) -> _Mask:
        shown, bias = self._shown(), self._bias()
        fills = [f.value for f in self.attention.scores.fills]
        number = next((v for v in fills if math.isfinite(v)), None)
        if number is not None:
            if len(set(fills)) > 1:
                raise Refused("its masks fill the scores with different numbers")
            lowest = torch.finfo(self.attention.products[0].meta["val"].dtype).min
            if not (number <= HIDDEN or number == lowest):
                raise Refused(f"hidden scores are {number:g}, which may count")
        finite = bias is None or not _may_be_infinite(bias)
        certain = shown is None or (finite and self._shows_every_row(shown))
        if shown is None:
            return _Mask(bias, None, None if bias is None or finite else self._empty(bias))
        if bias is None:
            empty = None if certain else self._empty(shown)
            if number is None or empty is None:
                return _Mask(shown, None, empty)
            return _Mask(self._emit(_aten.logical_or.default, shown, empty), empty, None)
        hidden = self._emit(_aten.logical_not.default, shown)
        mask = self._emit(_aten.masked_fill.Scalar, bias, hidden, -math.inf)
        if certain:
            return _Mask(mask, None, None)
        empty = self._empty(mask)
        if number is None:
            return _Mask(mask, None, empty)
        mask = self._emit(
            _aten.masked_fill.Scalar, mask, self._emit(_aten.logical_and.default, empty, hidden), 0.0
        )
        return _Mask(mask, empty, None if finite else self._empty(mask))

    def _shows_every_row(self, shown: fx.Node) -> bool:
        return shows_every_row(shown, mutated_nodes(self.graph.nodes))

    def _empty(self, mask: fx.Node) -> fx.Node:
        """Emit bool [batch, heads, rows, 1]: True for rows that a mask hides completely."""
        if mask.meta["val"].dtype is torch.bool:
            return self._emit(_aten.logical_not.default, self._emit(_aten.any.dim, mask, -1, True))
        return self._emit(_aten.all.dim, self._emit(_aten.eq.Scalar, mask, -math.inf), -1, True)

    def _shown(self) -> fx.Node | None:
        """Emit a bool mask over the keys, True where scores are not filled; return None if none are."""
        shown: fx.Node | None = None
        for fill in self.attention.scores.fills:
            if fill.value > 0 or math.isnan(fill.value):
                raise Refused(f"scores are filled with {fill.value:g}")
            mask = self._over_keys(fill.of)
            if fill.hides:
                mask = self._emit(_aten.logical_not.default, mask)
            shown = mask if shown is None else self._emit(_aten.logical_and.default, shown, mask)
        return shown

    def _bias(self) -> fx.Node | None:
        """Emit the sum of all biases of the scores in the call's dtype. Return None if there are none."""
        total: fx.Node | None = None
        for bias in self.attention.scores.biases:
            term = self._over_keys(bias.of)
            if bias.factor != 1.0:
                term = self._emit(_aten.mul.Tensor, term, bias.factor)
            total = term if total is None else self._emit(_aten.add.Tensor, total, term)
        if total is None or total.meta["val"].dtype == self.dtype:
            return total
        numbers = values(total)
        if not _fits(total, self.dtype) and not (numbers and all(_same_in(v, self.dtype) for v in numbers)):
            raise Refused(f"a mask of {total.meta['val'].dtype} beside {self.dtype}")
        return self._emit(_aten.to.dtype, total, self.dtype)

    def _over_keys(self, operand: Operand) -> fx.Node:
        axes = {a for d in operand.layout for a in self.axes.now(d)}
        if not set(self.axes.now(self.attention.keys)) <= axes:
            raise Refused("a mask that is the same for all keys")
        return self._canonical(operand, (self.attention.rows, self.attention.keys), spread_batch=False)


def _unpermuted(operand: Operand) -> Operand:
    """Return the operand that another is a permutation or copy of: kernels read it by its strides."""
    node, layout = operand.node, operand.layout
    while isinstance(permuted := rearrangement(node), Permuted):
        layout = tuple(layout[permuted.order.index(d)] for d in range(len(layout)))
        node = node.all_input_nodes[0]
    return Operand(node, layout)


def _two(attention: Attention, now: Any) -> tuple[Dim, Dim]:
    """Return the dimensions of a batch as two: the first one of the scores, and all others.

    If the batch is one dimension, its axes are taken as the dimensions.
    """
    dims = [now(d) for d in attention.batch]
    if len(dims) == 1:
        dims = [(a,) for a in dims[0]]
    if len(dims) < 2:
        return (), tuple(a for d in dims for a in d)
    return dims[0], tuple(a for d in dims[1:] for a in d)


def _fits(node: fx.Node, dtype: torch.dtype) -> bool:
    """True if `dtype` represents every number of a tensor's dtype."""
    node_dtype = node.meta["val"].dtype
    return node_dtype.is_floating_point and torch.promote_types(node_dtype, dtype) == dtype


def _same_in(value: float, dtype: torch.dtype) -> bool:
    return math.isinf(value) or math.isfinite(float(torch.tensor(value).to(dtype)))


def _may_be_infinite(mask: fx.Node) -> bool:
    numbers = values(mask)
    return numbers is None or any(math.isinf(v) for v in numbers)


def no_kernel(query: fx.Node, value: fx.Node, mask: fx.Node | None, dropout: float) -> str:
    """Return why PyTorch has no fused kernel for a call, or "" if it has one for contiguous rows."""
    q, v = query.meta["val"], value.meta["val"]
    device, dtype, heads = q.device.type, q.dtype, (q.shape[-1], v.shape[-1])
    same = expression(heads[0]) == expression(heads[1])
    allowed = torch.backends.cuda
    others = device != "cpu" and (allowed.mem_efficient_sdp_enabled() or allowed.cudnn_sdp_enabled())
    if not (allowed.flash_sdp_enabled() or others):
        return "every fused kernel is turned off"
    if device == "cpu":
        if dropout:
            return "no fused kernel has dropout on a CPU"
        return "" if same else f"no fused kernel for heads of {heads[0]} and {heads[1]} on cpu"
    half = dtype in (torch.float16, torch.bfloat16)
    if device != "cuda" or not (half or dtype is torch.float32):
        return f"no fused kernel for {dtype} on {device}"
    if not all(isinstance(h, int) and h <= MAX_HEAD for h in heads):
        return f"no fused kernel for heads of {heads[0]} and {heads[1]}"
    flash = half and mask is None and same
    if not flash and any(h % (8 if half else 4) for h in heads):
        return f"no fused kernel for heads of {heads[0]} and {heads[1]} with a mask or in {dtype}"
    return ""


_WITH_ANY_MASK = Pass(
    RULE,
    Replacements(RULE, (*SOFTMAXES, _aten.div.Tensor), partial(_look, leaves_masks=False)),
    does="Call scaled_dot_product_attention for attention that is written out.",
    when="a fused kernel takes its dtypes, sizes and mask",
    gains="the scores are never stored",
    rounds_as_eager=False,
)
FUSED_ATTENTION = replace(
    _WITH_ANY_MASK,
    apply=Replacements(RULE, (*SOFTMAXES, _aten.div.Tensor), partial(_look, leaves_masks=True)),
    needs="general attention",
    otherwise=_WITH_ANY_MASK,
)
