"""Make FakeTensors of arguments, and let a trace read and write nothing but FakeTensors."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, cast

from torch import Tensor
from torch._guards import TracingContext
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

# Operators whose rule is registered with FakeTensorMode itself, which looks it up when it is dispatched to.
REDIRECTED: Container[object] = registered_hop_fake_fns


def fake_of(tensor: Tensor, mode: FakeTensorMode, context: TracingContext) -> FakeTensor:
    """Return the FakeTensor of `mode` for an argument, with the sizes that TorchDynamo gave it."""
    symbolic: Any = context.tensor_to_context.get(tensor)
    source = symbolic.tensor_source if symbolic is not None else None
    return mode.from_tensor(tensor, symbolic_context=symbolic, source=source, trace=symbolic is None)


class FakesOnly(FakeTensorMode):
    """A FakeTensorMode that neither reads nor writes tensors with data, except for literals of the code.

    FakeTensorMode itself runs an operator on real data if no tensor argument is fake, which is how it keeps
    the values of literals. The model's `x.add_(1)` on a tensor that a function holds would then change that
    tensor.
    """

    supports_higher_order_operators = True  # else they look for a rule of this very class

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator) and func not in REDIRECTED:
            rule = func.python_key_table.get(FakeTensorMode)
            if rule is None:
                raise NotImplementedError(f"PyTorch has no rule for {func} on FakeTensors")
            return rule(self, *args, **(kwargs or {}))
        arguments: tuple[Any, dict[str, Any]] = (args, kwargs or {})
        if func not in self.lift_fns:
            arguments = pytree.tree_map_only(Tensor, self._faked, arguments)
        return super().__torch_dispatch__(cast("Any", func), types, *arguments)

    def _faked(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.from_tensor(tensor)
