"""Run kernels on CPU tensors in Triton's interpreter, in a process that also compiles them.

Triton decides when a kernel is defined whether it will be interpreted (TRITON_INTERPRET), for the
whole process. Here the same @triton.jit function can be compiled and interpreted: while
`interpreting()` is in force, the language's functions work on NumPy arrays, and what the
interpreter gets wrong or lacks is put right:

- conversion to bfloat16 rounds to nearest even, as the hardware does (Triton's truncates), and
  arithmetic on bfloat16 works on its values (Triton's on its bits);
- conversion to floats of eight bits carries into the exponent (Triton's makes -4 of -7.9) and saturates;
- `and`, `or` and `not` of blocks are element by element;
- a reduction by any function halves the axis in steps, as the hardware does (Triton's calls the
  function once for each element, in Python);
- libdevice and the `approx` instructions of inline assembly exist;
- an index out of range is an IndexError that has its value; what is read by it, outside of the kernel's
  arguments, is zero.
"""

from __future__ import annotations

import ast
import functools
import re
import threading
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.runtime import interpreter as base
from triton.runtime.jit import JITFunction

from fusion_compiler.codegen import math as fm
from fusion_compiler.errors import IndexRangeError, KernelError
from fusion_compiler.ir.kernel import Kernel
from fusion_compiler.runtime.builds import TRITON_LOCK, load_kernel
from fusion_compiler.runtime.libdevice import APPROXIMATIONS, LIBDEVICE, Array
from fusion_compiler.runtime.target import argument_type

TensorHandle = base.TensorHandle
EIGHT_BITS = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def run_kernel(kernel: Kernel, values: Sequence[torch.Tensor | int], grid: Sequence[int]) -> None:
    """Run `kernel` once for every program of `grid`, in order, on CPU tensors.

    values: a tensor for each buffer among `kernel.arguments` and an int for each size, in their
    order. Raises IndexRangeError for an index that is not within what it indexes, and KernelError with the
    interpreter's reason when the kernel fails otherwise.
    """
    types = [argument_type(argument) for argument in kernel.arguments]
    try:
        addresses = [_address(value) for value in values]
        memory = [_extent(value) for value in values if isinstance(value, torch.Tensor)]
        run_source(kernel.source, kernel.name, types, addresses, grid, kernel.together, memory)
    except IndexRangeError:
        raise
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        raise KernelError(kernel=kernel.name, action="run in the interpreter", detail=detail) from error


def run_source(
    source: str,
    name: str,
    types: Sequence[str],
    values: Sequence[int | float],
    grid: Sequence[int],
    together: int = 1,
    memory: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Run the kernel `name` of the module `source`.

    types: Triton's names of the parameters' types ("*bf16", "i64"). values: an address on the host
    for each pointer, a number for each other. together: programs that wait for each other. memory: the
    first address and the end of all that may be read, where it is known. Raises what the kernel raises.
    """
    arguments = [_argument(value, kind) for value, kind in zip(values, types, strict=True)]
    extents = (*grid, 1, 1)[:3]
    with interpreting(memory):
        function = _rewritten(load_kernel(source, name).fn)
        base.interpreter_builder.set_grid_dim(*extents)
        programs = product(*map(range, extents))
        if together == 1:
            for program in programs:
                base.interpreter_builder.set_grid_idx(*program)
                function(*arguments)
        else:
            while group := tuple(islice(programs, together)):
                _Group(group).run(lambda: function(*arguments))


class _Group:
    """A group runs programs that meet: a thread each, of which one runs until it has to wait for the
    others."""

    current: _Group | None = None

    def __init__(self, programs: Sequence[tuple[int, ...]]) -> None:
        self.programs = programs
        self.baton = threading.Condition()
        self.failed: list[BaseException] = []
        self.ended = 0
        self.deadline = time.monotonic() + 300

    def run(self, program: Callable[[], None]) -> None:
        threads = [threading.Thread(target=self._run, args=(program, number)) for number in self.programs]
        _Group.current = self
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _Group.current = None
        if self.failed:
            raise self.failed[0]

    def _run(self, program: Callable[[], None], number: tuple[int, ...]) -> None:
        with self.baton, np.errstate(all="ignore"):
            try:
                base.interpreter_builder.set_grid_idx(*number)
                program()
            except BaseException as error:
                self.failed.append(error)
            self.ended += 1
            self.baton.notify_all()

    def wait(self) -> None:
        """Let the other programs go on."""
        number = base.interpreter_builder.grid_idx
        self.baton.notify_all()
        if self.ended < len(self.programs) - 1:
            self.baton.wait(timeout=0.1)
        if self.failed or time.monotonic() > self.deadline:
            raise RuntimeError("a program waits for programs that have failed or never send")
        base.interpreter_builder.set_grid_idx(*number)


def _address(value: torch.Tensor | int) -> int:
    if isinstance(value, int):
        return value
    if value.device.type != "cpu":
        raise ValueError(f"the interpreter needs CPU tensors, not one on {value.device}")
    return value.data_ptr()


def _extent(value: torch.Tensor) -> tuple[int, int]:
    """Return the memory that a tensor is a view of: kernels read whole words at its ends, and views by
    strides."""
    storage = value.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _argument(value: float, name: str) -> tl.tensor:
    kind: Any = tl.str_to_ty(name, None)
    return tl.tensor(TensorHandle(np.array([value], base._get_np_dtype(kind)), kind), kind)


@functools.lru_cache(maxsize=1024)
def _rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    # Takes the plain function: hashing a JITFunction reads the language that is being replaced.
    function.__globals__.update(LOGIC)
    rewriter = base.FunctionRewriter(function)
    rewriter.ast_transformer = _LogicTransformer()
    return rewriter.rewrite_ast()


class _LogicTransformer(base.ASTTransformer):
    """Compute `a and b`, `a or b` and `not a` of blocks element by element: Python would ask for one bool."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:  # noqa: N802
        name = "fusion_and" if isinstance(node.op, ast.And) else "fusion_or"
        result, *others = (self.visit(value) for value in node.values)
        for other in others:
            late = ast.Lambda(ast.arguments([], [], None, [], [], None, []), other)
            result = ast.Call(ast.Name(name, ast.Load()), [result, late], [])
        return result

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:  # noqa: N802
        node.value = self.visit(node.value)  # the base class leaves it alone
        return super().visit_Assign(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.Call(ast.Name("fusion_not", ast.Load()), [node.operand], [])


def _is_block(value: Any) -> bool:
    return isinstance(value, tl.tensor) and isinstance(value.type, tl.block_type)


def _and(left: Any, right: Callable[[], Any]) -> Any:
    return left.logical_and(right()) if _is_block(left) else left and right()


def _or(left: Any, right: Callable[[], Any]) -> Any:
    return left.logical_or(right()) if _is_block(left) else left or right()


def _not(value: Any) -> Any:
    return value == 0 if _is_block(value) else not value


LOGIC: dict[str, Callable[..., Any]] = {"fusion_and": _and, "fusion_or": _or, "fusion_not": _not}


@contextmanager
def interpreting(memory: Sequence[tuple[int, int]] | None = None) -> Generator[None]:
    """Let @triton.jit functions be called and work on NumPy arrays, while entered. memory: see `run_source`.

    It takes the lock that compiling takes, and leaves Triton as it was before.
    """
    # Philox multiplies with wrap-around, and masked lanes hold anything: neither is worth a warning.
    with TRITON_LOCK, np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        scope = base._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        try:
            _patch_calls(scope)
            _patch_builder(scope, memory)
            _patch_libdevice(scope)
            yield
        finally:
            scope.restore()


def _patch_calls(scope: Any) -> None:
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.fn is fm.delivered.fn and _Group.current is not None:
            _Group.current.wait()
        return _rewritten(self.fn)(*args, **kwargs)

    for kind in (JITFunction, base.InterpretedFunction):  # the latter where TRITON_INTERPRET is set
        scope.set_attr(kind, "__call__", call)
    scope.set_attr(fm, "check_index", _check_index)
    scope.set_attr(base.ReduceOps, "apply_impl", _reduce)
    scope.set_attr(base.ScanOps, "apply_impl", _scan)
    scope.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())  # Triton 3.6 with NumPy 2.5


def _check_index(index: Any, low: Any, high: Any, what: str, inside: Any = None) -> None:
    bounds = [bound.handle.data.item() if isinstance(bound, tl.tensor) else bound for bound in (low, high)]
    least, end = map(int, bounds)
    values = index.handle.data
    outside = (values < least) | (values >= end)
    if inside is not None:
        values, outside = np.broadcast_arrays(values, outside & inside.handle.data)
    if outside.any():
        raise IndexRangeError(what=what, value=values[outside][0], low=least, high=end)


def _patch_builder(scope: Any, memory: Sequence[tuple[int, int]] | None) -> None:
    builder = base.interpreter_builder
    if memory is not None:
        load = functools.partial(_load_inside, builder.create_masked_load, memory)
        scope.set_attr(builder, "create_masked_load", load)
    # Integers wrap, as on the hardware and in eager. Triton looks for it, in a third of the time, and then
    # says nothing where its debugging is off.
    scope.set_attr(builder, "options", replace(builder.options, sanitize_overflow=False))
    for name, function in BUILDER_FUNCTIONS.items():
        scope.set_attr(builder, name, function)
    for name in ("binary_op", "unary_op"):
        scope.set_attr(builder, name, functools.partial(_on_bfloat16_values, getattr(builder, name)))


def _load_inside(
    load: Callable[..., Any],
    memory: Sequence[tuple[int, int]],
    addresses: Any,
    mask: Any,
    *rest: Any,
    **options: Any,
) -> Any:
    """Load the lanes whose addresses are those of an argument; nothing is read elsewhere."""
    data = addresses.data
    if data.size and not any(start <= data.min() and data.max() < end for start, end in memory):
        inside = functools.reduce(np.logical_or, [(data >= start) & (data < end) for start, end in memory])
        mask = TensorHandle(np.asarray(mask.data) & inside, tl.int1)  # a descriptor's mask is a bare array
    return load(addresses, mask, *rest, **options)


def _patch_libdevice(scope: Any) -> None:
    for name, bound in _bound_libdevice().items():
        scope.set_attr(cuda_libdevice, name, bound)
        scope.set_attr(libdevice, name, bound)


@functools.cache
def _bound_libdevice() -> dict[str, Callable[..., Any]]:
    """Return libdevice's functions by name, with the interpreter bound to them."""
    functions = {n: f for n, f in vars(cuda_libdevice).items() if tl.core.is_builtin(f)}
    return {name: functools.partial(_with_semantic, function) for name, function in functions.items()}


def _with_semantic(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **(kwargs | {"_semantic": base.interpreter_semantic}))


# -- numbers --------------------------------------------------------------------------------------


def _decode(data: Array, kind: tl.dtype) -> Array:
    """Return a handle's array as numbers that NumPy can work with: bfloat16 is held as its 16 bits."""
    if kind != tl.bfloat16 or data.dtype == bool:  # a comparison's result keeps its operands' type
        return data
    return (data.astype(np.uint32) << 16).view(np.float32)


def _encode(values: Array, kind: tl.dtype) -> Array:
    """Return numbers as the array of a handle, rounded to nearest even."""
    if kind != tl.bfloat16:
        return values.astype(base._get_np_dtype(kind))
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40  # adding could carry a NaN's payload into infinity or the sign
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def _cast(source: Any, to: Any, *_: Any) -> Any:
    kind = to.scalar
    return TensorHandle(_encode(_decode(source.data, source.dtype.scalar), kind), kind)


def _to_eight_bits(values: Array, dtype: torch.dtype) -> Array:
    """Return the bits of floats of eight bits, rounded to nearest even, the largest in the place of larger
    ones."""
    largest = torch.finfo(dtype).max
    clipped = np.clip(values.astype(np.float32), -largest, largest)
    return torch.from_numpy(np.atleast_1d(clipped)).to(dtype).view(torch.uint8).numpy().reshape(values.shape)


def _float_to_float(source: Any, to: Any, rounding: Any) -> Any:
    kind = to.scalar
    if rounding == base._ir.ROUNDING_MODE.RTNE and kind in EIGHT_BITS and not source.dtype.scalar.is_fp8():
        return TensorHandle(_to_eight_bits(_decode(source.data, source.dtype.scalar), EIGHT_BITS[kind]), kind)
    if rounding == base._ir.ROUNDING_MODE.RTNE and not kind.is_fp8() and not source.dtype.scalar.is_fp8():
        return _cast(source, to)
    data = base._convert_float(source.data, source.dtype.scalar, kind, rounding)
    return TensorHandle(data.view(base._get_np_dtype(kind)), kind)


def _on_bfloat16_values(operator: Callable[..., Any], *operands_and_function: Any) -> Any:
    *operands, function = operands_and_function
    if operands[0].dtype.scalar != tl.bfloat16:
        return operator(*operands, function)
    result = function(*(_decode(operand.data, tl.bfloat16) for operand in operands))
    return TensorHandle(result if result.dtype == bool else _encode(result, tl.bfloat16), tl.bfloat16)


def _splat(result_type: Any, scalar: Any) -> Any:
    # In the dtype of the data: a comparison's result is bool, whatever the handle's type says.
    data = scalar.data.reshape(-1)[0]
    return TensorHandle(np.full(result_type.shape, data, dtype=scalar.data.dtype), scalar.dtype.scalar)


def _fused_multiply_add(x: Any, y: Any, z: Any) -> Any:
    # One rounding: in float64 the product of two float32 is exact.
    kind = z.dtype.scalar
    x, y, z = (_decode(operand.data, kind).astype(np.float64) for operand in (x, y, z))
    return TensorHandle(_encode(x * y + z, kind), kind)


def _tile_product(x: Any, y: Any, before: Any, *_: Any) -> Any:
    a, b = (_decode(operand.data, operand.dtype.scalar) for operand in (x, y))
    return TensorHandle(np.matmul(a, b, dtype=before.data.dtype) + before.data, before.dtype.scalar)


def _high_product(x: Any, y: Any) -> Any:
    """Return the upper half of an unsigned product; Python's own integers would be slow for 64 bits."""
    kind, bits = x.dtype.scalar, x.data.dtype.itemsize * 4
    unsigned = np.dtype(f"u{x.data.dtype.itemsize}")
    a, b = x.data.astype(unsigned), y.data.astype(unsigned)
    low = unsigned.type((1 << bits) - 1)
    shift = unsigned.type(bits)
    middle = (a >> shift) * (b & low) + (((a & low) * (b & low)) >> shift)
    other = (a & low) * (b >> shift) + (middle & low)
    high = (a >> shift) * (b >> shift) + (middle >> shift) + (other >> shift)
    return TensorHandle(high.astype(x.data.dtype), kind)


def _reduce(operation: Any, inputs: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """Compute tl.reduce by any associative function of one tensor or of several side by side."""
    axis = operation.axis
    arrays = [tensor.handle.data for tensor in inputs]
    kinds = [tensor.dtype for tensor in inputs]
    kept = tuple(
        1 if axis is None or i == axis % arrays[0].ndim else extent
        for i, extent in enumerate(arrays[0].shape)
    )
    if axis is None:
        arrays, axis = [array.reshape(-1) for array in arrays], 0
    ufunc = REDUCTIONS.get(operation.combine_fn.fn)
    if ufunc is not None and len(arrays) == 1:
        values = _decode(arrays[0], kinds[0])
        arrays = [_encode(np.asarray(ufunc.reduce(values, axis=axis, dtype=values.dtype)), kinds[0])]
    else:
        arrays = _halve(operation.combine_fn, [np.moveaxis(array, axis, 0) for array in arrays], kinds)
    if operation.keep_dims:
        arrays = [array.reshape(kept) for array in arrays]
    return [
        operation.to_tensor(array if array.ndim else array.item(), kind)
        for array, kind in zip(arrays, kinds, strict=True)
    ]


def _scan(operation: Any, inputs: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """Compute tl.associative_scan: each step combines what lies twice as far apart (Hillis and Steele,
    1986)."""
    axis, kinds = operation.axis, [tensor.dtype for tensor in inputs]
    order = slice(None, None, -1) if operation.reverse else slice(None)
    arrays = [np.moveaxis(tensor.handle.data, axis, 0)[order] for tensor in inputs]
    apart = 1
    while apart < arrays[0].shape[0]:
        left, right = (
            [_block(array, kind) for array, kind in zip(side, kinds, strict=True)]
            for side in ([np.roll(array, apart, 0) for array in arrays], arrays)
        )
        combined = _rewritten(operation.combine_fn.fn)(*left, *right)
        results = combined if isinstance(combined, tuple) else (combined,)
        arrays = [
            np.concatenate([array[:apart], result.handle.data[apart:]])
            for array, result in zip(arrays, results, strict=True)
        ]
        apart *= 2
    return [
        operation.to_tensor(np.moveaxis(array[order], 0, axis), kind)
        for array, kind in zip(arrays, kinds, strict=True)
    ]


def _halve(combine: JITFunction[Any], arrays: list[Array], kinds: Sequence[tl.dtype]) -> list[Array]:
    """Reduce the first axis (a power of two long) by combining neighbours until one is left."""
    while (extent := arrays[0].shape[0]) > 1:
        left, right = (
            [_block(array[side::2], kind) for array, kind in zip(arrays, kinds, strict=True)]
            for side in (0, 1)
        )
        combined = _rewritten(combine.fn)(*left, *right)
        results = combined if isinstance(combined, tuple) else (combined,)
        shape = (extent // 2, *arrays[0].shape[1:])
        arrays = [np.broadcast_to(result.handle.data, shape) for result in results]
    return [array[0] for array in arrays]


def _block(data: Array, kind: tl.dtype) -> tl.tensor:
    return tl.tensor(TensorHandle(data, kind), tl.block_type(kind, list(data.shape)))


# -- what Triton's interpreter lacks ------------------------------------------------------------


def _extern_elementwise(_lib: str, _path: str, symbol: str, arguments: Any, result: Any, _pure: bool) -> Any:
    """Compute a libdevice function by its symbol: __nv_tanhf, __nv_tanh, __nv_isnand and the like.

    The result is computed in float64 and rounded once, which is at least as close as libdevice is.
    """
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    kind = result.scalar
    arrays = [argument.data for argument in arguments]
    if name in ("nextafter", "nextafterf"):  # the one function that depends on the width
        return TensorHandle(np.nextafter(*arrays), kind)
    # The suffix says the width: none or d is double, f float, and fdiv_rn and ddiv_rn have a prefix.
    names = (name, name[:-1] if name[-1] in "fd" else name, name[1:])
    function = next((LIBDEVICE[n] for n in names if n in LIBDEVICE), None)
    if function is None:
        raise NotImplementedError(f"libdevice's {symbol} has no counterpart in the interpreter")
    wide = [array.astype(np.float64) for array in arrays]
    return TensorHandle(np.asarray(function(*wide)).astype(base._get_np_dtype(kind)), kind)


def _inline_assembly(asm: str, _constraints: str, values: Any, results: Any, _pure: bool, _pack: int) -> Any:
    """Run PTX: the instructions that approximate a function, and integer ones, one after the other."""
    registers: dict[str, Any] = {f"${len(results) + i}": value.data for i, value in enumerate(values)}
    body = asm.strip().removeprefix("{").removesuffix("}")
    for statement in filter(None, (line.strip() for line in body.split(";"))):
        name, _, rest = statement.partition(" ")
        if name == ".reg":
            continue
        targets, operands = re.fullmatch(r"\s*(\{[^}]*\}|[^,]+),\s*(.*)", rest).groups()  # type: ignore[union-attr]
        numbers = [registers.get(o) if o in registers else int(o, 0) for o in re.split(r",\s*", operands)]
        results_of = _ptx(name, numbers)
        if results_of is None:
            raise NotImplementedError(f"inline assembly {asm!r} has no counterpart in the interpreter")
        registers.update(zip(re.findall(r"[$\w]+", targets), results_of, strict=True))
    handles = [TensorHandle(registers[f"${i}"], kind.scalar) for i, kind in enumerate(results)]
    return SimpleNamespace(get_result=handles.__getitem__)


def _ptx(name: str, numbers: list[Any]) -> tuple[Array, ...] | None:
    """Return the results of one instruction, or None for an unknown instruction."""
    match name.removesuffix(".f32").removesuffix(".ftz").split("."):
        case [function, "approx"] if function in APPROXIMATIONS:
            return (APPROXIMATIONS[function](numbers[0].astype(np.float64)).astype(np.float32),)
        case ["mul", "wide", "u32"]:
            return (numbers[0].astype(np.uint64) * np.uint64(numbers[1]),)
        case ["mov", "b64"]:  # into two halves
            return numbers[0].astype(np.uint32), (numbers[0] >> np.uint64(32)).astype(np.uint32)
        case ["xor", "b32"]:
            return (numbers[0] ^ numbers[1],)
        case _:
            return None


def _error_function(argument: Any) -> Any:
    wide = _decode(argument.data, argument.dtype.scalar).astype(np.float64)
    return TensorHandle(_encode(LIBDEVICE["erf"](wide), argument.dtype.scalar), argument.dtype.scalar)


def _binary(ufunc: np.ufunc) -> Callable[[Any, Any], Any]:
    return lambda left, right: base.interpreter_builder.binary_op(left, right, ufunc)


def _clamp(value: Any, low: Any, high: Any, propagate: Any) -> Any:
    """Clamp values. A NaN stays NaN if the kernel asks for it, and else becomes the lower bound, as on the
    hardware."""
    kind = value.dtype.scalar
    x, least, most = (_decode(operand.data, kind) for operand in (value, low, high))
    keep = propagate == base._ir.PROPAGATE_NAN.ALL
    result = np.minimum(np.maximum(x, least), most) if keep else np.fmin(np.fmax(x, least), most)
    return TensorHandle(_encode(result, kind), kind)


BUILDER_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "cast_impl": _cast,
    "create_fp_to_fp": _float_to_float,
    "create_splat": _splat,
    "create_fma": _fused_multiply_add,
    "create_dot": _tile_product,
    "create_clampf": _clamp,
    "create_umulhi": _high_product,
    "create_erf": _error_function,
    "create_extern_elementwise": _extern_elementwise,
    "create_inline_asm": _inline_assembly,
    # IEEE 754's maxNum: the operand that is a number wins.
    "create_maxnumf": _binary(np.fmax),
    "create_minnumf": _binary(np.fmin),
}

# The functions by which tl.sum, tl.max and their like reduce; any other is called as it is. Plain
# functions: see `_rewritten`.
REDUCTIONS: dict[Any, np.ufunc] = {
    tl.standard._sum_combine.fn: np.add,
    tl.standard._prod_combine.fn: np.multiply,
    tl.standard._elementwise_max.fn: np.fmax,
    tl.standard._elementwise_min.fn: np.fmin,
    tl.standard._xor_combine.fn: np.bitwise_xor,
    tl.standard._or_combine.fn: np.bitwise_or,
}
