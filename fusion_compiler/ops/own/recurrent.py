"""Define nn.LSTM, nn.GRU and nn.RNN as one operator each, which calls PyTorch's library: cuDNN on a GPU.

PyTorch traces a recurrent layer step by step: about ten operators for each, and a new graph for every length
of the sequence. An operator of this file runs the layer once, as eager does, forward and backward.

A library saves more than its results for its backward pass, in a form of its own. So the forward operator
runs under autograd and keeps autograd's graph, as a Python attribute of its last result, `record`, an empty
tensor. The backward operator goes through that graph. Where the attribute is lost
(`torch.autograd.graph.save_on_cpu` replaces saved tensors), it runs the layer once more.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload

from fusion_compiler.errors import LostRecordError
from fusion_compiler.ops.own.define import define

KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
LAYERS = frozenset(name for kind in KINDS for name in (kind, f"{kind}_backward"))

# operands: the input, the hidden states, the weights. autocast: the dtype of the autocast region around the
# call. wanted: which operands get a gradient; empty in inference.
_SETTING = (
    "Tensor? batch_sizes, int states, bool has_biases, int num_layers, float dropout, bool train,"
    " bool bidirectional, bool batch_first, ScalarType? autocast, bool[] wanted"
)
_RECORD = "_fusion_compiler_record"
_C: Any = torch._C
_AUTOGRAD = [
    k for n, k in DispatchKey.__members__.items() if n.startswith("Autograd") or n == "ADInplaceOrView"
]


@dataclass(frozen=True)
class Setting:
    """The arguments of a recurrent operator after its operands, in the order of its schema."""

    batch_sizes: Tensor | None
    states: int
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool
    autocast: torch.dtype | None
    wanted: Sequence[bool]

    @property
    def turned(self) -> bool:
        """True if a sequence [batch, steps, ...] lies in memory as [steps, batch, ...]."""
        return self.batch_first and self.batch_sizes is None


@dataclass(frozen=True)
class Record:
    """A record is a forward pass under autograd: its results, and the operands that get a gradient."""

    results: Sequence[Tensor]
    leaves: Sequence[Tensor]


def recurrent(kind: str, packed: bool, *arguments: Any) -> tuple[Tensor, ...]:
    """Call the operator `kind` of this file with the arguments of `aten.lstm.input`, or if `packed` those of
    `aten.lstm.data`. Return the output and the final hidden states, as ATen's operator does."""
    if packed:
        x, batch_sizes, hidden, weights, *options = arguments
        options.append(False)  # batch_first
    else:
        (x, hidden, weights, *options), batch_sizes = arguments, None
    hidden = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    operands = [x, *hidden, *weights]
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    wanted = [t.requires_grad for t in operands] if torch.is_grad_enabled() else []
    wanted = wanted if any(wanted) else []
    run = _operator(kind)
    results = run(operands, batch_sizes, len(hidden), *options, autocast, wanted)
    return tuple(results[: 1 + len(hidden)])  # without the record


def _operator(name: str) -> OpOverload:
    return getattr(torch.ops.fusion_compiler, name).default


def _call(kind: str, operands: Sequence[Tensor], setting: Setting) -> Sequence[Tensor]:
    """Run the layer by PyTorch's own operator. Return the output and the final hidden states."""
    x, *others = operands
    hidden: Any = others[: setting.states]
    hidden = hidden if kind == "lstm" else hidden[0]
    run, weights = getattr(torch, kind), others[setting.states :]
    options = (setting.has_biases, setting.num_layers, setting.dropout, setting.train, setting.bidirectional)
    region = torch.autocast(x.device.type, setting.autocast) if setting.autocast else contextlib.nullcontext()
    with region:
        if setting.batch_sizes is not None:
            return run(x, setting.batch_sizes, hidden, weights, *options)
        return run(x, hidden, weights, *options, setting.batch_first)


@contextlib.contextmanager
def _autograd() -> Generator[None]:
    """Let autograd record, also within an operator that PyTorch calls below autograd, while entered."""
    excluded = _C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    with _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def _recorded(kind: str, operands: Sequence[Tensor], setting: Setting) -> Record:
    with _autograd():
        pairs = zip(operands, setting.wanted, strict=True)
        inputs = [t.detach().requires_grad_(wanted) for t, wanted in pairs]
        return Record(_call(kind, inputs, setting), [t for t in inputs if t.requires_grad])


def _run(kind: str, operands: Sequence[Tensor], *options: Any) -> list[Tensor]:
    setting = Setting(*options)
    if not setting.wanted:
        output, *states = _call(kind, operands, setting)
        return [_laid(output, setting.turned), *map(_laid, states)]
    recorded = _recorded(kind, operands, setting)
    output, *states = (result.detach() for result in recorded.results)
    record = _empty_record()
    setattr(record, _RECORD, recorded)
    return [_laid(output, setting.turned), *map(_laid, states), record]


def _laid(x: Tensor, turned: bool = False) -> Tensor:
    """Return `x` in the order of memory that the fake operators promise: contiguous, or if `turned` with the
    first two dimensions exchanged. Nothing is copied for what a library returns in this order."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if turned else x.contiguous()


def _empty(like: Tensor, shape: Sequence[int], turned: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor in the order of memory of `_laid`."""
    if not turned:
        return like.new_empty(shape, dtype=dtype)
    first, second, *others = shape
    return like.new_empty((second, first, *others), dtype=dtype).transpose(0, 1)


def _empty_record() -> Tensor:
    """Return the tensor that holds a record. It is on the CPU, so that no CUDA graph is made of a graph that
    returns it: a replay would make no new record."""
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _run_backward(
    kind: str,
    record: Tensor,
    gradients: Sequence[Tensor | None],
    results: Sequence[Tensor],
    operands: Sequence[Tensor],
    *options: Any,
) -> list[Tensor]:
    """Return the gradients of the operands that want one.

    results: of the forward. The record shows their memory, so that nothing else may be written there before.
    """
    del results
    setting = Setting(*options)
    recorded: Record | None = getattr(record, _RECORD, None)
    if recorded is None:
        if setting.train and setting.dropout and setting.num_layers > 1:
            raise LostRecordError(layer=kind)
        recorded = _recorded(kind, operands, setting)
    pairs = [(r, g) for r, g in zip(recorded.results, gradients, strict=True) if g is not None]
    with _autograd():
        results, sent = [r for r, _ in pairs], [g for _, g in pairs]
        computed: Any = torch.autograd.grad(
            results, recorded.leaves, sent, retain_graph=True, allow_unused=True
        )
    filled = [torch.zeros_like(t) if g is None else g for t, g in zip(recorded.leaves, computed, strict=True)]
    return [_laid(g, turned) for g, turned in zip(filled, _turned(setting), strict=True)]


def _turned(setting: Setting) -> list[bool]:
    """Return for each gradient whether it is turned (`_laid`): only that of the input, the first operand."""
    return [setting.turned and i == 0 for i, wanted in enumerate(setting.wanted) if wanted]


def _fake(kind: str, operands: Sequence[Tensor], *options: Any) -> list[Tensor]:
    setting = Setting(*options)
    x, hidden = operands[0], operands[1 : 1 + setting.states]
    dtype = _dtype(kind, x, hidden[0], setting.autocast)
    width = hidden[0].shape[-1] * (2 if setting.bidirectional else 1)
    output = _empty(x, (*x.shape[:-1], width), setting.turned, dtype)
    record = [_empty_record()] if setting.wanted else []
    return [output, *(h.new_empty(h.shape, dtype=dtype) for h in hidden), *record]


def _dtype(kind: str, x: Tensor, hidden: Tensor, autocast: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a layer's results. A GRU on a CPU does not convert its hidden state."""
    if autocast is None:
        return x.dtype
    return torch.promote_types(hidden.dtype, autocast) if kind == "gru" and x.is_cpu else autocast


def _fake_backward(
    kind: str, record: Tensor, gradients: Any, results: Any, operands: Sequence[Tensor], *options: Any
) -> list[Tensor]:
    del kind, record, gradients, results
    setting = Setting(*options)
    leaves = [t for t, wants in zip(operands, setting.wanted, strict=True) if wants]
    return [_empty(t, t.shape, turned) for t, turned in zip(leaves, _turned(setting), strict=True)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    operands, batch_sizes, *ctx.options = inputs
    ctx.count = len(operands)
    ctx.save_for_backward(*operands, *output, batch_sizes)


def _gradient(kind: str, ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    *tensors, record, batch_sizes = ctx.saved_tensors
    operands, results = tensors[: ctx.count], tensors[ctx.count :]
    run = _operator(f"{kind}_backward")
    results_of_run = iter(run(record, gradients[:-1], results, operands, batch_sizes, *ctx.options))
    *_, wanted = ctx.options
    return [next(results_of_run) if wants else None for wants in wanted], None, *(None for _ in ctx.options)


def _define(kind: str) -> None:
    define(
        kind,
        f"(Tensor[] operands, {_SETTING}) -> Tensor[]",
        functools.partial(_run, kind),
        functools.partial(_fake, kind),
        tags=(torch.Tag.nondeterministic_seeded,),  # dropout between the layers
        gradient=functools.partial(_gradient, kind),
        save=_save,
    )
    define(
        f"{kind}_backward",
        "(Tensor record, Tensor?[] gradients, Tensor[] results, Tensor[] operands, "
        f"{_SETTING}) -> Tensor[]",
        functools.partial(_run_backward, kind),
        functools.partial(_fake_backward, kind),
    )


for _kind in KINDS:
    _define(_kind)
FORWARDS = frozenset(map(_operator, KINDS))
OPERATORS = tuple(map(_operator, sorted(LAYERS)))
