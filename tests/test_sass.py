"""Every golden kernel is a kernel on every architecture: it compiles, and keeps its values in registers.

No GPU is needed: the result is read from what the compiler wrote. The golden kernels are the first
candidates, those that run where nothing is tuned.
"""

from __future__ import annotations

import functools

import pytest

from fusion_compiler.kernel import Kernel
from fusion_compiler.target import Binary, compile_for
from tests.golden_cases import FOLDER, parse_kernels

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
CASES = sorted(file.name.removesuffix(".kernels.txt") for file in FOLDER.glob("*.kernels.txt"))


@functools.cache
def distinct_kernels() -> dict[str, tuple[Kernel, ...]]:
    """The kernels of each case that no case before it has."""
    seen: set[object] = set()
    found: dict[str, tuple[Kernel, ...]] = {}
    for case in CASES:
        kernels = parse_kernels((FOLDER / f"{case}.kernels.txt").read_text(encoding="utf-8"))
        new = [k for k in kernels if _key(k) not in seen]
        seen.update(map(_key, kernels))
        found[case] = tuple(new)
    return found


def _key(kernel: Kernel) -> object:
    """What decides the machine code: not the name, nor the lines of the model in the docstring."""
    head, _, rest = kernel.source.partition('"""')
    body = rest.partition('"""')[2]
    return head.replace(kernel.name, "kernel"), body, kernel.arguments, kernel.num_warps, kernel.num_stages


def allowed(binary: Binary) -> int:
    """Bytes of a thread that may lie in memory: none, but for libdevice's sine and cosine.

    Their slow path keeps an array there, and for sm_100 ptxas spills one number (4 bytes of an 8-byte
    slot) to go with it, at 32 of 255 registers: no schedule's doing.
    """
    return 8 if "__local_depot" in binary.asm.get("ptx", "") else 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_without_spills(case: str, target: str) -> None:
    binaries = {kernel.name: compile_for(kernel, target) for kernel in distinct_kernels()[case]}
    spilled = {name: b.spills for name, b in binaries.items() if b.spills > allowed(b)}
    assert not spilled, f"{target}: bytes (NVIDIA) or registers (AMD) in memory: {spilled}"
    assert all(binary.registers > 0 for binary in binaries.values())


def test_there_are_kernels_of_every_case() -> None:
    assert len(CASES) > 15 and sum(map(len, distinct_kernels().values())) > 60
    for case in CASES:
        assert parse_kernels((FOLDER / f"{case}.kernels.txt").read_text(encoding="utf-8")), case
