"""Find out what a kernel becomes on a GPU, without the GPU: registers, spills, shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from fusion_compiler.errors import KernelError
from fusion_compiler.ir.kernel import Argument, Kernel, Role
from fusion_compiler.runtime.builds import Build, compile_build

TRITON_TYPES = {
    torch.bool: "i1",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


@dataclass(frozen=True)
class Binary:
    """A binary is a compiled kernel.

    registers: a thread's (vector registers on AMD). spills: bytes of a thread's local memory on
    NVIDIA, vector registers on AMD; 0 is none. shared_bytes: of a program.
    asm: text of each stage ("ttir", "ttgir", "llir", "ptx" or "amdgcn").
    """

    registers: int
    spills: int
    shared_bytes: int
    asm: dict[str, str]


def argument_type(argument: Argument) -> str:
    """Return Triton's name for the type of a parameter: "*bf16" for a buffer, "i64" for a size, "fp32" for a
    number."""
    name = TRITON_TYPES[argument.dtype]
    return name if argument.role in (Role.SIZE, Role.NUMBER) else f"*{name}"


def parse_target(target: str) -> tuple[str, int | str, int]:
    """Parse sm_90 -> ("cuda", 90, 32) and gfx942 -> ("hip", "gfx942", 64). Raise ValueError for others."""
    if match := re.fullmatch(r"sm_(\d+)", target):
        return "cuda", int(match[1]), 32
    if re.fullmatch(r"gfx\w+", target):
        # CDNA (gfx9) has wavefronts of 64, RDNA of 32.
        return "hip", target, 64 if target.startswith("gfx9") else 32
    raise ValueError(f"{target!r} is not a target; use sm_80, sm_90, sm_100 or gfx942")


def build_of(
    kernel: Kernel,
    target: tuple[str, int | str, int],
    loose: frozenset[str] = frozenset(),
    wide_sizes: bool = False,
) -> Build:
    """Return the build of `kernel` for a target.

    loose: inputs and sizes, by `Argument.launch_name`, that are no multiples of 16, whatever its arguments
        claim.
    wide_sizes: sizes are 64-bit even if the kernel would take them as 32-bit.
    """

    def type_of(argument: Argument) -> str:
        wide = wide_sizes and argument.role is Role.SIZE
        return "i64" if wide else argument_type(argument)

    def is_divisible(argument: Argument) -> bool:
        return argument.aligned and argument.launch_name not in loose

    arguments = kernel.arguments
    return Build(
        source=kernel.source,
        name=kernel.name,
        signature=tuple((argument.name, type_of(argument)) for argument in arguments),
        divisible=tuple(i for i, argument in enumerate(arguments) if is_divisible(argument)),
        target=target,
        num_warps=kernel.num_warps,
        num_stages=kernel.num_stages,
        registers=kernel.registers,
        fp_fusion=kernel.fp_fusion,
        cooperative=kernel.together > 1,
        dependent=kernel.dependent,
    )


def compile_for(kernel: Kernel, target: str) -> Binary:
    """Compile `kernel` for "sm_80", "sm_90", "sm_100", "gfx942" and the like; this needs no GPU.

    Raises ValueError for an unknown target and KernelError when the kernel does not compile.
    """
    parsed = parse_target(target)
    try:
        compiled = compile_build(build_of(kernel, parsed))
    except Exception as error:
        raise KernelError(kernel=kernel.name, action=f"compile for {target}", detail=error) from error
    asm = {stage: text for stage, text in compiled.asm.items() if isinstance(text, str)}
    if parsed[0] == "cuda":
        registers, local = _cubin_resources(compiled.asm["cubin"])
        spills = max(0, local - _declared_local(asm["ptx"]))
    else:
        registers = _directive(asm["amdgcn"], "vgpr_count")
        spills = _directive(asm["amdgcn"], "vgpr_spill_count")
    return Binary(registers, spills, compiled.metadata.shared, asm)


def _cubin_resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of local memory of a thread, from the cubin by Triton's own cuobjdump.

    Spilled registers go to local memory (STACK and LOCAL), beside arrays that are declared so.
    """
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def _declared_local(ptx: str) -> int:
    """Return the bytes of a thread's declared arrays, such as the slow path of libdevice's sine keeps."""
    return sum(-(-int(size) // 8) * 8 for size in re.findall(r"__local_depot\d+\[(\d+)\];", ptx))


def _directive(amdgcn: str, name: str) -> int:
    match = re.search(rf"\.{name}:\s*(\d+)", amdgcn)
    assert match is not None, f"the assembly says no .{name}"
    return int(match[1])
