"""Every golden kernel is a kernel on every architecture: it compiles, and keeps its values in registers.

No GPU is needed: the result is read from what the compiler wrote. The golden kernels are the first
candidates, those that run where nothing is tuned.
"""

from __future__ import annotations

import functools
import math
import re

import pytest
import triton

from fusion_compiler.ir.kernel import Kernel
from fusion_compiler.runtime.target import Binary, compile_for
from tests.disassembly import instructions
from tests.golden_cases import FOLDER, parse_kernels

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
CASES = sorted(file.name.removesuffix(".kernels.txt") for file in FOLDER.glob("*.kernels.txt"))


@functools.cache
def distinct_kernels() -> dict[str, tuple[Kernel, ...]]:
    """The kernels of each case that no case before it has."""
    seen: set[object] = set()
    distinct: dict[str, tuple[Kernel, ...]] = {}
    for case in CASES:
        kernels = parse_kernels((FOLDER / f"{case}.kernels.txt").read_text(encoding="utf-8"))
        new = [k for k in kernels if _key(k) not in seen]
        seen.update(map(_key, kernels))
        distinct[case] = tuple(new)
    return distinct


def _key(kernel: Kernel) -> object:
    """Return all that decides the machine code: not the name, nor the lines of the model in the docstring."""
    head, _, rest = kernel.source.partition('"""')
    body = rest.partition('"""')[2]
    options = kernel.num_warps, kernel.num_stages, kernel.registers
    return head.replace(kernel.name, "kernel"), body, kernel.arguments, options


def allowed(binary: Binary) -> int:
    """Bytes of a thread that may lie in memory: none, but for libdevice's sine and cosine.

    Their slow path keeps an array there, and for sm_100 ptxas spills one number (4 bytes of an 8-byte
    slot) to go with it, at 32 of 255 registers: no schedule's doing.
    """
    return 8 if "__local_depot" in binary.asm.get("ptx", "") else 0


# What the oldest compiler that is supported spills, in bytes; sm_100 was new to it.
OLDER = {("3.6", "sm_100", "whisper"): 24}


# Bytes that ptxas keeps in memory for a while to do with fewer registers than the 255 that it may have: one
# value of an embedding's thread (40 registers), beside the 64 that it moves; a few of a softmax with dropout
# that is computed again beside its gradient (128 registers), beside the 672 that each thread moves; one of a
# thread that joins chunks of attention (64 registers, 72 and none where it waits for no kernel).
FEW_REGISTERS = {
    ("sm_90", "embedding_rms_norm"): 8,
    ("sm_90", "add_sub_exp_div_zeros_like_etc"): 32,
    ("sm_100", "add_sub_exp_div_zeros_like_etc"): 48,
    ("sm_100", "div_amax_sub_exp_sum_etc"): 8,
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_without_spills(case: str, target: str) -> None:
    binaries = {kernel.name: compile_for(kernel, target) for kernel in distinct_kernels()[case]}
    tolerated = OLDER.get((triton.__version__.rpartition(".")[0], target, case), 0)
    most = {n: max(allowed(b), tolerated, FEW_REGISTERS.get((target, n), 0)) for n, b in binaries.items()}
    spilled = {name: b.spills for name, b in binaries.items() if b.spills > most[name]}
    assert not spilled, f"{target}: bytes (NVIDIA) or registers (AMD) in memory: {spilled}"
    assert all(binary.registers > 0 for binary in binaries.values())


# Golden case, kernel -> instructions of sm_90 that an element may take, and those of the slow unit among
# them. An H200 at the speed of its memory has time for 7.8 and 0.98 for each byte moved (132 SMs of 128
# and 16 lanes at 1.98 GHz, 4.28 TB/s): 47 and 5.9 where two bfloat16 tensors become one.
MOST = {
    ("bias_gelu", "add_gelu"): (16, 2),
    ("bias_gelu", "add_gelu_backward_sum"): (27, 4),
    ("vit", "gelu"): (22, 2),
    ("swiglu", "swiglu"): (12, 2),
    ("swiglu", "swiglu_backward_mul"): (20, 2),
    ("chain", "tanh_sigmoid_mul_sub_tanh_etc"): (47, 8),
    ("chain", "neg_tanh_sigmoid_mul_sub_etc"): (83, 8),
    ("bias_dropout_residual_norm", "add_dropout_add_layer_norm"): (32, 0.1),
    ("bias_dropout_residual_norm", "layer_norm_backward_mul_sum_dropout_sum"): (36, 0.1),
    ("scale_mask_softmax", "mul_add_softmax"): (14, 1.1),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(("case", "name"), MOST)
def test_no_long_way_round(case: str, name: str) -> None:
    """A function's slow path, a conversion too many or Philox for each element would show here."""
    text = (FOLDER / f"{case}.kernels.txt").read_text(encoding="utf-8")
    kernel = next(k for k in parse_kernels(text) if k.name == name)
    elements = math.prod(map(int, re.findall(r"= tl\.arange\(0, (\d+)\)", kernel.source)))
    an_element = 32 * kernel.num_warps / elements
    names = instructions(kernel, "sm_90")
    most, slow = MOST[case, name]
    assert most / 2 < len(names) * an_element <= most
    assert names.count("MUFU") * an_element <= slow


def test_there_are_kernels_of_every_case() -> None:
    assert len(CASES) > 15 and sum(map(len, distinct_kernels().values())) > 60
    for case in CASES:
        assert parse_kernels((FOLDER / f"{case}.kernels.txt").read_text(encoding="utf-8")), case
