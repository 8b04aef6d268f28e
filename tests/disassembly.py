"""The machine instructions that a kernel becomes on an NVIDIA GPU, without the GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from triton import knobs

from fusion_compiler.ir.kernel import Kernel
from fusion_compiler.runtime.builds import compile_build
from fusion_compiler.runtime.target import build_of, parse_target


def instructions(kernel: Kernel, target: str) -> tuple[str, ...]:
    """Return the names of the machine instructions of `kernel` on an NVIDIA target ("sm_90"): those of its
    longest loop, or all if it has none. "MUFU" are those of the slow unit (exp2, reciprocal, tanh, ...).

    Raises what compiling raises.
    """
    compiled = compile_build(build_of(kernel, parse_target(target)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.nvdisasm.path, "-c", str(file)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names: list[str] = []
    labels: dict[str, int] = {}
    loop = (0, 0)
    for label, name, rest in re.findall(
        r"^(?:(\.L_x_\d+):|\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)(.*))$", text, re.MULTILINE
    ):
        if label:
            labels[label] = len(names)
        elif name != "NOP":
            names.append(name)
            back = re.search(r"`\((\.L_x_\d+)\)", rest) if name == "BRA" else None
            start = labels.get(back[1]) if back else None
            if start is not None and len(names) - start > max(1, loop[1] - loop[0]):
                loop = (start, len(names))
    return tuple(names[slice(*loop)] if loop[1] else names)
