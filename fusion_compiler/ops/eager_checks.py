"""Recognise calls that only eager's kernels decide: those that they refuse, or answer by PyTorch's version.

PyTorch's meta kernels and decompositions check less than its kernels: gelu of integers has a meta kernel, and
no other. Versions differ in what a clamp does with a bound that the dtype cannot hold. Such a call is neither
decomposed nor computed in a kernel of ours. It stays an ATen call, which does what eager does. A check that
refuses a call that eager accepts costs speed only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from fusion_compiler.ops.schema import bound

Arguments = Mapping[str, Any]  # of a call, by the names of its schema; tensors have a shape and a dtype

# Operators of floating-point tensors.
_FLOATING = """
    _batch_norm_no_update _batch_norm_with_update_functional _fused_rms_norm _log_softmax
    _log_softmax_backward_data _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _prelu_kernel _safe_softmax _softmax _softmax_backward_data
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d binary_cross_entropy
    binary_cross_entropy_with_logits celu elu frac gelu glu hardshrink hardsigmoid hardswish huber_loss
    hypot im2col leaky_relu lerp log_sigmoid_forward logaddexp logaddexp2 logcumsumexp mish mse_loss
    native_batch_norm native_group_norm native_layer_norm round.decimals silu smooth_l1_loss
    soft_margin_loss softplus softshrink std std_mean upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d var
    var_mean
"""
_FLOATING_BUT_TARGETS = "nll_loss2d_forward nll_loss_forward"
_INTEGERS = "bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor"
_NOT_BOOL = """
    abs addcmul addmv bitwise_left_shift bitwise_right_shift bucketize ceil div.Tensor_mode dot
    floor floor_divide fmod linalg_cross mv pow.Tensor_Tensor reflection_pad1d reflection_pad2d
    reflection_pad3d remainder replication_pad1d replication_pad2d replication_pad3d round threshold
    trace trunc vdot
"""
_OF_ONE_DTYPE = "addmm addmv baddbmm bmm dot heaviside linalg_cross mm mv vdot"
_OF_CHANNELS = """
    _batch_norm_no_update _batch_norm_with_update_functional _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training native_batch_norm
"""
_ALONG_DIM = "_log_softmax _softmax cummax cummin"
_BOUNDED = "clamp clamp_max clamp_min hardtanh"


def refuses(target: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if eager is known to raise an error for a call of an ATen operator; tensors may be fake."""
    checks = checks_of(target)
    if not checks:
        return False
    assert isinstance(target, OpOverload)
    named = bound(target, args, kwargs)
    return any(check(named) for check in checks)


def refuses_node(node: fx.Node) -> bool:
    """True if eager is known to raise an error for a node of a traced graph."""
    if not checks_of(node.target):
        return False
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    return refuses(node.target, args, kwargs)


def checks_of(target: object) -> tuple[Callable[[Arguments], Any], ...]:
    """Return the checks of an operator. A check is True for arguments that eager refuses."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return ()
    return (*_CHECKS.get(target._opname, ()), *_CHECKS.get(f"{target._opname}.{target._overloadname}", ()))


def _dtypes(call: Arguments) -> list[torch.dtype]:
    return [x.dtype for x in call.values() if isinstance(x, Tensor)]


def _has_integers(call: Arguments) -> bool:
    return not all(d.is_floating_point or d.is_complex for d in _dtypes(call))


def _has_floats(call: Arguments) -> bool:
    return any(d.is_floating_point or d.is_complex for d in _dtypes(call))


def _has_more_than_channels(call: Arguments) -> bool:
    rest = (x for name, x in call.items() if isinstance(x, Tensor) and name != "input")
    return any(x.dim() != 1 for x in rest)


def _is_outside(dim: int, rank: int) -> bool:
    return not -max(rank, 1) <= dim < max(rank, 1)


def _has_no_such_dim(call: Arguments) -> bool:
    return _is_outside(call["dim"], call["self"].dim())


def _differ(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """True if two shapes are known to differ; a symbolic size differs from no other."""
    if len(a) != len(b):
        return True
    return any(type(m) is int and type(n) is int and m != n for m, n in zip(a, b, strict=True))


def _without(shape: Sequence[Any], dim: int) -> list[Any]:
    place = dim % max(len(shape), 1)
    return [*shape[:place], *shape[place + 1 :]]


def _is_smaller_than(*names: str) -> Callable[[Arguments], bool]:
    """Return a check that is True if one of these tensors does not broadcast to the shape of `self`."""

    def check(call: Arguments) -> bool:
        shape = call["self"].shape
        others = [call[name].shape for name in names if call[name] is not None]
        if any(len(other) > len(shape) for other in others):
            return True
        ends = ((other, shape[len(shape) - len(other) :]) for other in others)
        return any(_differ(o, [1 if m == 1 else n for m, n in zip(o, end, strict=True)]) for o, end in ends)

    return check


def _does_not_divide(call: Arguments) -> bool:
    """True for a pixel_unshuffle unless height and width are multiples of the factor."""
    sizes, factor = call["self"].shape[-2:], call["downscale_factor"]
    return factor > 0 and any(type(n) is int and n % factor for n in sizes)


def _adds_other_rows(call: Arguments) -> bool:
    """True for an index_add unless the source has the shape of what it is added to, but for the dimension of
    the index."""
    x, source = call["self"], call["source"]
    rest = (_without(t.shape, call["dim"]) for t in (x, source))
    return x.dim() != source.dim() or _differ(*rest)


def _selects_wrongly(call: Arguments) -> bool:
    """True for an index_select unless it takes integers along a dimension, one of them for a tensor without
    dimensions."""
    x, index = call["self"], call["index"]
    several = not x.dim() and index.dim() and _differ(index.shape, (1,))
    return several or index.dtype not in (torch.int32, torch.int64) or _has_no_such_dim(call)


def _copies_wrongly(call: Arguments) -> bool:
    """True for an index_copy unless there is a place for each slice of a source with as many dimensions, or
    one place if there are none."""
    x, source, index = call["self"], call["source"], call["index"]
    if index.dtype is not torch.int64 or (x.dim() and source.dim() and x.dim() != source.dim()):
        return True
    return not source.dim() and index.dim() and _differ(index.shape, (1,))


def _replaces_another_shape(call: Arguments) -> bool:
    """True for a select_scatter unless the source has the shape of the slice, which lies inside."""
    x, dim, index = call["self"], call["dim"], call["index"]
    if _is_outside(dim, x.dim()) or _differ(_without(x.shape, dim), call["src"].shape):
        return True
    size = x.shape[dim]
    return type(index) is int and type(size) is int and not -size <= index < size


def _inverts_integers(call: Arguments) -> bool:
    """True for a pow of integers with a negative exponent."""
    negative = type(call["exponent"]) is int and call["exponent"] < 0
    return negative and not _has_floats({"self": call["self"]})


def _is_bounded_outside(call: Arguments) -> bool:
    """True for a clamp of integers with a bound outside of the dtype: by PyTorch's version it wraps around,
    is an error or is ignored."""
    x = call["self"]
    if x.dtype is torch.bool or not _has_integers({"self": x}):
        return False
    range_ = torch.iinfo(x.dtype)
    return any(type(bound) is int and not range_.min <= bound <= range_.max for bound in call.values())


def _table() -> Iterator[tuple[str, Callable[[Arguments], Any]]]:
    for names, check in (
        (_FLOATING, _has_integers),
        (_FLOATING_BUT_TARGETS, lambda call: _has_integers({**call, "target": None})),
        (_INTEGERS, _has_floats),
        (_NOT_BOOL, lambda call: {*_dtypes(call)} <= {torch.bool}),
        (_OF_ONE_DTYPE, lambda call: len({*_dtypes(call)}) > 1),
        (_OF_CHANNELS, _has_more_than_channels),
        (_ALONG_DIM, _has_no_such_dim),
        (_BOUNDED, _is_bounded_outside),
    ):
        yield from ((name, check) for name in names.split())
    yield "_softmax_backward_data", lambda call: _differ(call["grad_output"].shape, call["output"].shape)
    yield "_log_softmax_backward_data", lambda call: _differ(call["grad_output"].shape, call["output"].shape)
    yield "binary_cross_entropy", _is_smaller_than("weight")
    yield "binary_cross_entropy_with_logits", _is_smaller_than("weight", "pos_weight")
    yield "soft_margin_loss", _is_smaller_than("target")
    yield "smooth_l1_loss", lambda call: call["beta"] < 0
    yield "huber_loss", lambda call: call["delta"] <= 0
    yield "index_copy", _copies_wrongly
    yield "embedding", lambda call: call["indices"].dtype not in (torch.int32, torch.int64)
    yield "index_fill", lambda call: call["index"].dtype is not torch.int64
    yield "pixel_unshuffle", _does_not_divide
    yield "pow.Tensor_Scalar", _inverts_integers
    yield "index_add", _adds_other_rows
    yield "index_put", lambda call: call["values"].dtype is not call["self"].dtype
    # There is a target for each pixel of each image.
    yield "nll_loss2d_forward", lambda call: _differ(_without(call["self"].shape, 1), call["target"].shape)
    yield "index_select", _selects_wrongly
    yield "select_scatter", _replaces_another_shape


_CHECKS: dict[str, tuple[Callable[[Arguments], Any], ...]] = {}
for _name, _check in _table():
    _CHECKS[_name] = (*_CHECKS.get(_name, ()), _check)
