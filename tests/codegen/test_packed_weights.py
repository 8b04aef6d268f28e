"""Weights of bytes and of their bits, with scales of groups: values, and what a kernel does for each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import fusion_compiler as fc
from fusion_compiler.codegen.emit import schedules_of
from fusion_compiler.compiler.runners import emit_cluster
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.kernel import Kernel
from fusion_compiler.runtime.target import compile_for
from tests.disassembly import instructions
from tests.exactness import Compiled, Schedules, cramped, not_as_close

GROUP = 32  # weights with one scale


pytestmark = pytest.mark.usefixtures("small_matrices")


def kernels_of(plan: fc.FusionPlan) -> Iterator[Kernel]:
    """Yield the kernels of the only cluster, one for each of its schedules on an H200."""
    (cluster,) = plan.clusters
    for program in emit_cluster(canonical(cluster, plan.dag), cluster, plan.dag, device_spec("h200")):
        yield from program.kernels


def interleaved(w: Tensor) -> Tensor:
    return torch.stack((w & 15, w >> 4), -1).flatten(1)


def halves(w: Tensor) -> Tensor:
    return torch.cat(((w & 240) >> 4, w & 15), 1)


def quarters(w: Tensor) -> Tensor:
    """Two bits each."""
    return torch.stack([(w >> shift) & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)


PACKED = (interleaved, halves, quarters)
BITS: tuple[tuple[Callable[[Tensor], Tensor], str], ...] = (  # and what makes floats of them
    (lambda x: (x & 15).float() - 8, "15, 0, 8"),
    (lambda x: ((x & 112) >> 4).float(), "112, 4, 0"),
    (lambda x: ((x & 127) >> 3 & 6).float() - 3, "48, 3, 3"),
    (lambda x: ((x >> 4) & 15).float(), "240, 4, 0"),
    (lambda x: torch.where(x > 9, x & 3, x & 96).float() + 1, "3, 0, 0"),
    (lambda x: (torch.where(x > 9, x & 3, x) - 1).float(), "255, 0, 0"),
)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_bytes_become_floats_without_conversions(dtype: torch.dtype) -> None:
    """A multiprocessor does only sixteen of these conversions in a cycle."""
    with FakeTensorMode():
        x = torch.empty(1, 4096, dtype=torch.bfloat16, device="cuda")
        w = torch.empty(2048, 4096, dtype=dtype, device="cuda")
        fast = fc.compile(lambda x, w: F.linear(x, w.to(x.dtype)), backend="eager", device="h200")
        with torch.no_grad():
            fast(x, w)
    (plan,) = fast.plan
    for kernel in kernels_of(plan):
        assert "fm.from_byte(" in kernel.source
        assert "I2F" not in instructions(kernel, "sm_90")
        assert not compile_for(kernel, "gfx942").spills


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_threads_multiply_what_they_loaded_and_convert_two_numbers_at_once(rows: int) -> None:
    """No thread passes products of bytes to another one within a loop, and where tensor cores multiply, no
    number is rounded by itself, of which a multiprocessor does sixteen in a cycle."""
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(rows, 4096, dtype=torch.bfloat16, device="cuda")
        w = torch.empty(8192, 4096, dtype=torch.int8, device="cuda")
        scale = torch.empty(8192, 1, dtype=torch.bfloat16, device="cuda")
        (plan,) = fc.explain(lambda x, w, s: F.linear(x, w.to(x.dtype) * s), x, w, scale, device="h200").plans
    by_threads = [k for k in kernels_of(plan) if "fm.contract" not in k.source]
    for kernel in kernels_of(plan):
        counts = Counter(name.partition(".")[0] for name in instructions(kernel, "sm_90"))
        words = r"in1_ptr \+ tl.max_contiguous\(.*?, \[(?:1, )?8\]\)|tl.arange\(0, 8\)"
        loads = re.findall(words, kernel.source)
        assert len(loads) == (kernel in by_threads) and not counts["F2F"], kernel.source
        assert not counts["FSEL"] or kernel not in by_threads, counts  # of what other threads sent
    assert by_threads


def test_only_neighbours_in_memory_are_loaded_together() -> None:
    x, matrix = torch.randn(2, 160).bfloat16(), torch.randint(-128, 128, (48, 5, 33), dtype=torch.int8)
    for w in (matrix.flatten(1)[:, 4:164], matrix.flatten(1).repeat(1, 2)[:, ::2][:, :160], matrix[:, :, 1:]):
        of = lambda x, w: F.linear(x, w.flatten(1).to(x.dtype))  # noqa: E731
        fast = Compiled(of)
        with torch.no_grad():
            assert not_as_close(fast(x, w), of(x, w), of(x.double(), w)) is None
        sources = [k.source for r in fast.compiler.runners.values() for c in r.candidates for k in c.kernels]
        assert any("max_contiguous" in s for s in sources) == (w.dim() == 2 and w.stride(1) == 1), w.stride()


@pytest.mark.sample(4)
@pytest.mark.parametrize("zero", [8, 0, -3, 7.5, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_bytes_that_are_computed_become_floats_exactly(dtype: torch.dtype, zero: float) -> None:
    """All 256 of them, less a zero."""
    bytes_ = torch.arange(256).to(torch.uint8).view(dtype)

    def f(x: Tensor) -> Tensor:
        return ((x ^ 85) >> 1).float() - zero

    fast = fc.compile(f, backend="interpret", strict=True)
    assert torch.equal(fast(bytes_), f(bytes_))
    (plan,) = fast.plan
    for kernel in kernels_of(plan):
        is_integer = zero in (8, 0, -3)
        assert "fm.from_bits(" in kernel.source and (" - " in kernel.source) is not is_integer
        assert "I2F" not in instructions(kernel, "sm_90")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_bytes_that_were_reduced_become_floats(dtype: torch.dtype) -> None:
    """They are wider ones in a kernel (a random program)."""
    x = torch.arange(256).to(torch.uint8).view(dtype).view(8, 32)
    f = lambda x: (x.amax(1).float() - 3, x.amin().float())  # noqa: E731
    ours = fc.compile(f, backend="interpret", strict=True)(x)
    assert all(map(torch.equal, ours, f(x)))


def test_a_norm_is_read_with_a_matrix_and_its_scales() -> None:
    """The weights have four bits each and a scale for each group; one loop reads both."""

    def f(x: Tensor, norm: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        low, high = w & 15, w >> 4
        q = torch.stack((low, high), -1).flatten(1).to(x.dtype) - 8
        q = (q.unflatten(1, (-1, 32)) * scale[..., None]).flatten(1)
        return F.linear(F.rms_norm(x, norm.shape, norm), q)

    x, norm, w = torch.randn(1, 512), torch.randn(512), torch.randint(0, 256, (48, 256), dtype=torch.uint8)
    scale = torch.rand(48, 16)
    fast = fc.compile(f, backend="interpret", strict=True)
    exact = f(x.double(), norm.double(), w, scale.double())
    assert not_as_close(fast(x, norm, w, scale), f(x, norm, w, scale), exact) is None
    (plan,) = fast.plan
    for kernel in kernels_of(plan):
        assert kernel.source.count("tl.load(in0_ptr") == 1, "of x"


@pytest.mark.sample(4)
@pytest.mark.parametrize(("f", "taken"), BITS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_bits_of_bytes_become_floats_exactly(
    dtype: torch.dtype, f: Callable[[Tensor], Tensor], taken: str
) -> None:
    """All 256 bytes, by one instruction that takes the bits and one that moves them and subtracts."""
    bytes_ = torch.arange(256).to(torch.uint8).view(dtype)
    fast = fc.compile(f, backend="interpret", strict=True)
    assert torch.equal(fast(bytes_), f(bytes_))
    (plan,) = fast.plan
    for kernel in kernels_of(plan):
        assert f", {taken}, " in kernel.source
        assert "I2F" not in instructions(kernel, "sm_90")


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x >> 4).float(),  # of int8 the sign goes down with it
        lambda x: (x & -16).float() - 1,
        lambda x: (x >> 9).float(),
        lambda x: ((x >> 2) & 63).float(),
        lambda x: ((x >> 5) & 15).float(),  # as many bits as there are not
        lambda x: ((x >> 2 >> 3) & 3).float() - 1,
        lambda x: (x << 2 & 60).float(),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_other_bits_of_bytes(dtype: torch.dtype, f: Callable[[Tensor], Tensor]) -> None:
    bytes_ = torch.arange(256).to(torch.uint8).view(dtype)
    assert torch.equal(fc.compile(f, backend="interpret", strict=True)(bytes_), f(bytes_))


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("f", "taken"),
    [
        (lambda x: (x & 15).float() - 8, "15, 0, 8"),
        (lambda x: ((x >> 8) & 127).float(), "32512, 8, 0"),
        (lambda x: ((x >> 12) & 15).float() - 8, "61440, 12, 8"),
        (lambda x: ((x & 0x7FFF) >> 14).float() + 3, "16384, 14, 0"),
        (lambda x: (torch.where(x > 0, x & 3, (x >> 9) & 63)).float(), "32256, 9, 0"),
        (lambda x: ((x >> 14) & 15).float(), ""),  # the highest bit goes down with the others, at any width
        (lambda x: ((x >> 20) & 15).float(), ""),
        (lambda x: ((x >> 28) & 15).float(), ""),
        (lambda x: (x >> 3).float(), ""),
        (lambda x: (x & 0xFFFFFF).float() if x.dtype is not torch.int16 else (x & 3).float(), ""),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_bits_of_wider_integers(dtype: torch.dtype, f: Callable[[Tensor], Tensor], taken: str) -> None:
    """Whatever their highest bit is; none is converted where it has the place in a float's digits."""
    info = torch.iinfo(dtype)
    ends = torch.tensor([info.min, info.max, -1, 0, 1], dtype=dtype)
    x = torch.cat((torch.randint(info.min, info.max, (500,), dtype=dtype), ends))
    fast = fc.compile(f, backend="interpret", strict=True)
    assert torch.equal(fast(x), f(x))
    (plan,) = fast.plan
    for kernel in kernels_of(plan):
        if taken:
            assert f", {taken}, " in kernel.source and "I2F" not in instructions(kernel, "sm_90")


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_eight_weights_in_a_word(rows: int) -> None:
    """As GPTQ packs them: along the sum, with a zero and a scale for each group, taken apart by a tensor."""

    def f(x: Tensor, words: Tensor, zeros: Tensor, scale: Tensor) -> Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=x.device)
        taken = torch.bitwise_right_shift(words[:, None].expand(-1, 8, -1), shifts[:, None]).to(torch.int16)
        q = torch.bitwise_and(taken, 15).flatten(0, 1).unflatten(0, (-1, GROUP))
        return x @ ((q.to(x.dtype) - zeros[:, None]) * scale[:, None]).flatten(0, 1)

    words = torch.randint(-(1 << 31), 1 << 31, (32, 24), dtype=torch.int64).to(torch.int32)
    x, zeros = torch.randn(rows, 256), torch.randint(0, 16, (8, 24)).float()
    scale = torch.randn(8, 24)
    fast = fc.compile(f, backend="interpret", strict=True)
    with torch.no_grad():
        ours, eager = fast(x, words, zeros, scale), f(x, words, zeros, scale)
        exact = f(x.double(), words, zeros.double(), scale.double())
    assert not_as_close(ours, eager, exact) is None
    (plan,) = fast.plan
    for kernel in kernels_of(plan):
        assert kernel.name.endswith("_finish") or ", 15, 0, 0, False)" in kernel.source


def test_bits_that_are_stored_too() -> None:
    """Bytes are made where something else wants them."""
    f = lambda x: ((x & 15) + 1, (x & 15).float())  # noqa: E731
    x = torch.arange(256).to(torch.uint8)
    assert all(map(torch.equal, fc.compile(f, backend="interpret", strict=True)(x), f(x)))


def grouped(x: Tensor, w: Tensor, scale: Tensor, unpacked: Callable[[Tensor], Tensor]) -> Tensor:
    q = (unpacked(w).to(x.dtype) - 8).unflatten(1, (-1, GROUP))
    return F.linear(x, (q * scale[..., None]).flatten(1))


@pytest.mark.sample(10)
@pytest.mark.parametrize("schedules", [schedules_of, cramped], ids=["own", "cramped"])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("unpacked", PACKED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_scales_of_groups(
    rows: int, unpacked: Callable[[Tensor], Tensor], number: int, schedules: Schedules
) -> None:
    w = torch.randint(0, 256, (24, 128), dtype=torch.uint8)
    width = unpacked(w).shape[1]
    x, scale = torch.randn(rows, width), torch.randn(24, width // GROUP)
    f = lambda x, w, scale: grouped(x, w, scale, unpacked)  # noqa: E731
    with torch.no_grad():
        ours, eager = Compiled(f, number, schedules)(x, w, scale), f(x, w, scale)
    assert not_as_close(ours, eager, f(x.double(), w, scale.double())) is None


@pytest.mark.parametrize("unpacked", PACKED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rows", [1, 4])
def test_bits_are_taken_where_they_are_multiplied(rows: int, unpacked: Callable[[Tensor], Tensor]) -> None:
    """At a cost that is none: they are not made before."""
    width = unpacked(torch.zeros(1, 2048, dtype=torch.uint8)).shape[1]
    with FakeTensorMode(), torch.no_grad():
        w = torch.empty(2048, 2048, dtype=torch.uint8, device="cuda")
        shapes = (rows, width), (2048, width // GROUP)
        x, scale = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
        (plan,) = fc.explain(lambda *t: grouped(*t, unpacked), x, w, scale, device="h200").plans
    (cluster,) = plan.clusters
    assert not plan.leftovers and cluster.cost.us < 1.5e6 * w.numel() / 4.28e12 + 5


def test_a_scale_is_multiplied_once_a_word() -> None:
    """The scale multiplies the sum of the word's terms: eight multiplications fewer for one more."""
    x, w = torch.randn(1, 512), torch.randint(0, 256, (48, 256), dtype=torch.uint8)
    fast = fc.compile(lambda *t: grouped(*t, interleaved), backend="interpret", strict=True)
    fast(x, w, torch.randn(48, 16))
    (plan,) = fast.plan
    for kernel in kernels_of(plan):
        (line,) = (text for text in kernel.source.splitlines() if "tl.sum(tl.reshape(" in text)
        assert "axis=2) * of_words" in line or "axis=1) * of_words" in line
        assert line.count(" * ") == 2
        assert kernel.source.count("tl.load(in2_ptr") == 1
        assert "rshift__ = " not in kernel.source and "to_copy = " not in kernel.source


@pytest.mark.parametrize("schedules", [schedules_of, cramped], ids=["own", "cramped"])
@pytest.mark.parametrize("number", range(4))
def test_factors_that_words_share_and_others(number: int, schedules: Schedules) -> None:
    """A factor twice; scales alone; one of a group that is shorter than a word; a number of terms that is not
    known to fill words."""

    def f(x: Tensor, w: Tensor, scale: Tensor, short: Tensor) -> tuple[Tensor, ...]:
        each = scale[..., None].expand(24, -1, 50).flatten(1)
        squared = F.linear(x, w * each * each)
        alone = F.linear(torch.ones_like(x), each)
        return squared, alone, F.linear(x, w * short[..., None].expand(24, -1, 2).flatten(1))

    inputs = torch.randn(1, 300), torch.randn(24, 300), torch.randn(24, 6), torch.randn(24, 150)
    with torch.no_grad():
        ours, eager = Compiled(f, number, schedules)(*inputs), f(*inputs)
    for our, their, truth in zip(ours, eager, f(*(t.double() for t in inputs)), strict=True):
        assert not_as_close(our, their, truth) is None
