"""Indices that are data: what lies outside is an error, and what is known to lie inside is not looked at."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.compiler.runners import emit_cluster
from fusion_compiler.errors import IndexRangeError
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.kernel import Kernel, Program
from fusion_compiler.runtime.target import compile_for
from tests.disassembly import instructions

Case = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def ints(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def x(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def scores(*shape: int) -> Tensor:
    return x(*shape).sin().requires_grad_()


# What the error says of the index, and the call.
OUTSIDE: dict[str, tuple[str, Case]] = {
    "embedding": ("99 is not in [0, 10)", (lambda i, e: F.embedding(i, e) * 2, (ints(1, 99), x(10, 4)))),
    "negative": ("-1 is not in [0, 10)", (lambda i, e: F.embedding(i, e) * 2, (ints(1, -1), x(10, 4)))),
    "far away": ("1099511627776", (lambda i, e: F.embedding(i, e) * 2, (ints(1, 1 << 40), x(10, 4)))),
    "int32": ("5 is not in [0, 5)", (lambda i, e: F.embedding(i, e) * 2, (ints(5).int(), x(5, 4)))),
    "gather": ("-2 is not in [0, 3)", (lambda a, i: a.gather(1, i) * 2, (x(2, 3), ints(0, -2)[:, None]))),
    "select": ("3 is not in [0, 3)", (lambda a, i: a.index_select(1, i) * 2, (x(2, 3), ints(0, 3)))),
    "index": ("3 is not in [-3, 3)", (lambda a, i: a[:, i] * 2, (x(2, 3), ints(0, 3)))),
    "index from the end": ("-4 is not in [-3, 3)", (lambda a, i: a[:, i] * 2, (x(2, 3), ints(0, -4)))),
    "one of two": ("3 is not in [-3, 3)", (lambda a, i, j: a[i, j] * 2, (x(2, 3), ints(-2, 1), ints(0, 3)))),
    "dimension of one": ("1 is not in [-1, 1)", (lambda a, i: a[i] * 2, (x(1, 3), ints(0, 1)))),
    "no dimension": ("1 is not in [0, 1)", (lambda a, i: a.gather(0, i) * 2, (x(1)[0], ints(1)[0]))),
    "in a loop": (
        "10 is not in [0, 10)",
        (lambda i, e: F.embedding(i, e).sum(0), (torch.arange(600) % 11, x(10, 40))),
    ),
    "target": ("10 is not in [0, 10)", (F.cross_entropy, (scores(3, 10), ints(1, 10, -100)))),
}

# The same, but inside.
INSIDE: dict[str, Case] = {
    "from the end": (lambda a, i, j: a[i, j] * 2, (x(2, 3), ints(-2, 1), ints(-3, 2))),
    "dimension of one": (lambda a, i: a[i] * 2, (x(1, 3), ints(0, -1))),
    "ignored target": (F.cross_entropy, (scores(3, 10), ints(1, 9, -100))),
    "lanes past the end": (lambda i, e: F.embedding(i, e) * 2, (torch.arange(1, 8), x(8, 3))),
    "past the end of a loop": (lambda i, e: F.embedding(i, e).sum(0), (torch.arange(601) % 10, x(10, 40))),
    "table of one element": (lambda a, i: (b := a.index_select(0, i), b.sum(0)), (x(1), ints(0, 0))),
    "one element": (lambda a, i: a.take(i) * 2, (x(2, 3), torch.tensor(-2))),
    "other side of a pad": (lambda a, i: F.pad(a[i], (0, 0, 2, 1)) + 1, (x(4, 3), ints(1, 3))),
}

# Known to lie inside.
KNOWN: dict[str, Case] = {
    "counted": (lambda a: a[torch.arange(3, device=a.device) + 1] * 2, (x(4, 3),)),
    "place of a maximum": (lambda a: a.gather(1, a.argmax(1, keepdim=True)) * 2, (x(4, 3),)),
    "places of a sort": (lambda a: a.gather(1, a.topk(2, 1)[1]) * 2, (x(4, 3),)),
    "clamped": (lambda a, i: a[i.clamp(-4, 3)] * 2, (x(4, 3), ints(9, -9))),
    "remainder": (lambda a, i: a[i % 4] * 2, (x(4, 3), ints(9, -9))),
    "bits": (lambda a, i: a[(i & 3) // 2 + 2] * 2, (x(4, 3), ints(9, -9))),
    "either": (lambda a, i: a[torch.where(i > 3, i.clamp(0, 1), 3)] * 2, (x(4, 3), ints(9, -9))),
    "flags": (lambda a, i: a[(i > 0).long()] * 2, (x(4, 3), ints(9, -9))),
}


def kernels_of(call: Case) -> str:
    function, arguments = call
    return "\n".join(fc.explain(function, *arguments).json()["kernels"].values())


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_outside_is_an_error(name: str) -> None:
    message, (function, arguments) = OUTSIDE[name]
    with pytest.raises((IndexError, RuntimeError)):  # of a tensor without dimensions
        function(*arguments)
    with pytest.raises(IndexRangeError, match=re.escape(message)) as raised:
        fc.compile(function, backend="interpret")(*arguments)
    if name != "target":  # whose line is PyTorch's own
        assert "test_lookups.py" in str(raised.value)
    assert "fm.check_index(" in kernels_of((function, arguments))


@pytest.mark.parametrize("name", INSIDE)
def test_one_inside_is_none(name: str) -> None:
    function, arguments = INSIDE[name]
    torch.testing.assert_close(fc.compile(function, backend="interpret")(*arguments), function(*arguments))
    assert "fm.check_index(" in kernels_of((function, arguments))


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_to_lie_inside_is_not_looked_at(name: str) -> None:
    function, arguments = KNOWN[name]
    torch.testing.assert_close(fc.compile(function, backend="interpret")(*arguments), function(*arguments))
    source = kernels_of((function, arguments))
    assert "tl.load(" in source and "fm.check_index(" not in source


def test_clusters_alike_but_for_what_is_known_of_their_indices() -> None:
    """The index's range is known outside of the cluster: the place of a maximum among 4 is below 4, among 9
    not."""

    def picked(table: Tensor, few: Tensor, many: Tensor) -> tuple[Tensor, Tensor]:
        return table[few.topk(2, 1)[1]] * 2, table[many.topk(2, 1)[1]] * 2

    for order in (picked, lambda table, few, many: picked(table, many, few)):
        with pytest.raises(IndexRangeError):
            fc.compile(order, backend="interpret")(x(4, 3), x(1, 4), x(1, 9))


def test_the_element_number_may_be_beyond_32_bits() -> None:
    call = (lambda i, e: F.embedding(i, e) * 2, (ints(5).int(), x(9, 4)))
    assert re.search(r"in1_ptr \+ in0\.to\(tl\.int64\) \* 4", kernels_of(call))


def programs_of(function: Callable[..., Tensor], *arguments: Tensor) -> list[Program]:
    """The first candidate of every forward cluster, for an H200."""
    (plan, *_) = fc.explain(function, *arguments, device="h200").plans
    spec = device_spec("h200")
    return [emit_cluster(canonical(c, plan.dag), c, plan.dag, spec)[0] for c in plan.clusters]


def unchecked(kernel: Kernel) -> Kernel:
    return replace(kernel, source=re.sub(r"\n +(fm\.check_index|wrong).*", "", kernel.source))


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


IDS = torch.empty(8192, dtype=torch.int64)
COSTS: dict[str, Case] = {
    "embedding": (lambda i, e, p: F.embedding(i, e) + p, (IDS, half(50257, 768), half(8192, 768))),
    "cross entropy of few": (F.cross_entropy, (half(8192, 100), IDS)),
    "gather in a loop": (
        lambda i, e, w: F.layer_norm(F.embedding(i, e) * w, (1024,)).sum(0),
        (IDS, half(50257, 1024), half(1024)),
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_a_check_costs_next_to_nothing(name: str) -> None:
    """A comparison, and a branch when all else is done, with fifteen instructions where nobody comes.

    In a loop Triton's own assertion would keep the next rows from being copied ahead.
    """
    function, arguments = COSTS[name]
    kernels = [kernel for program in programs_of(function, *arguments) for kernel in program.kernels]
    checked = [kernel for kernel in kernels if "fm.check_index(" in kernel.source]
    assert checked
    for kernel in checked:
        with_it, without = compile_for(kernel, "sm_90"), compile_for(unchecked(kernel), "sm_90")
        more = 24 if "loop" in name else 6  # of 128 that a thread may have there
        assert with_it.registers <= max(32, without.registers + more)
        assert with_it.spills == 0
        ahead = [binary.asm["ptx"].count("cp.async") for binary in (with_it, without)]
        assert ahead[0] >= ahead[1] and bool(ahead[1]) == ("loop" in name)
        count, before = (len(instructions(k, "sm_90")) for k in (kernel, unchecked(kernel)))
        assert count <= 1.1 * before + 40


def bags(ids: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    """Sums of four rows of each table."""
    return tuple([F.embedding(ids[:, i], table).sum(1) for i, table in enumerate(tables)])


@pytest.mark.parametrize("wrong", [0, 1, 2, None])
def test_indices_with_the_same_error_are_looked_at_together(wrong: int | None) -> None:
    ids = torch.randint(10, (5, 3, 4))
    tables = [x(10, 8) * (i + 1) for i in range(3)]
    if wrong is None:
        for got, truth in zip(
            fc.compile(bags, backend="interpret")(ids, *tables), bags(ids, *tables), strict=True
        ):
            torch.testing.assert_close(got, truth)
    else:
        ids[3, wrong, 1] = 10
        with pytest.raises(IndexRangeError, match=re.escape("10 is not in [0, 10)")):
            fc.compile(bags, backend="interpret")(ids, *tables)
    assert kernels_of((bags, (ids, *tables))).count("fm.check_index(") == 1  # type: ignore[arg-type]


def spills(program: Program) -> list[int]:
    return [compile_for(kernel, "sm_90").spills for kernel in program.kernels]


def test_many_lookups_keep_their_values_in_registers() -> None:
    ids, tables = torch.empty((16384, 11, 4), dtype=torch.int64), [half(20000, 64) for _ in range(11)]
    assert not any(map(sum, map(spills, programs_of(bags, ids, *tables))))  # type: ignore[arg-type]


def test_many_results_keep_their_values_in_registers() -> None:
    def places(ids: Tensor) -> tuple[Tensor, ...]:
        return tuple([torch.where(ids[:, i] < 0, ids[:, i] + 7, ids[:, i]) for i in range(30)])

    programs = programs_of(places, torch.empty((65536, 30), dtype=torch.int64))  # type: ignore[arg-type]
    assert not any(map(sum, map(spills, programs)))
