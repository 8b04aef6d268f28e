"""docs/techniques.md: what stands after each technique is cut out of a kernel that is made now."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fusion_compiler as fc
from fusion_compiler.codegen.emit import emit, program_of, schedules_of
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.device import device_spec
from fusion_compiler.schedule.placement import Access, Placement, Via
from tests import ROOT
from tests.codegen.test_golden import of_pinned_versions

PAGE = ROOT / "docs" / "techniques.md"
DEVICE = "h200"
LONGEST = 16  # lines


# -- the small programs -------------------------------------------------------------------------------


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def add_heads(x: Tensor, y: Tensor) -> Tensor:
    heads = x.unflatten(-1, (32, 128)) + y.unflatten(-1, (32, 128))
    return heads.flatten(0, 1)


def concatenation(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a * b, a + b], -1)


def bias_of_channels(x: Tensor, bias: Tensor) -> Tensor:
    return F.relu(x + bias[:, None, None])


def product_of_nibbles(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    weight = torch.stack((w & 15, w >> 4), -1).flatten(1).to(x.dtype) - 8
    return F.linear(x, (weight.unflatten(1, (-1, 128)) * scale[..., None]).flatten(1))


def rotary_of_pairs(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = q[..., ::2], q[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def decays(x: Tensor) -> Tensor:
    sums = x.cumsum(-1)
    return (sums[..., -1:] - sums).exp()


def sum_of_squares(x: Tensor) -> Tensor:
    return x.square().sum(-1)


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def layer_norm_with_weights(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, w.shape, w, b)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w)


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, 32, w, b)


def mean_of_maxima(x: Tensor) -> Tensor:
    return x.amax(-1).mean()


def bias_gradients(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return (x @ a).sum(0), (x @ b).sum(0)


def normed_rows_product(x: Tensor, norm: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, norm.shape, norm), w)


def residual_product(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return residual + F.linear(x, w)


def product_of_bytes(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype))


def normed_product(x: Tensor, norm: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, norm.shape, norm) @ w


def add_rms_norm(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, F.rms_norm(total, w.shape, w)


def is_maximum(x: Tensor) -> Tensor:
    y = x * 1.1
    return y == y.amax(-1, keepdim=True)


def depthwise(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(F.conv2d(x.permute(0, 3, 1, 2), w, padding=2, groups=len(w)))


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.1)


def embedding_rms_norm(tokens: Tensor, table: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(table[tokens], w.shape, w)


def store_keys(cache: Tensor, key: Tensor, cos: Tensor, sin: Tensor, at: Tensor) -> Tensor:
    turned = torch.cat([-key[..., 64:], key[..., :64]], -1)
    cache.index_copy_(1, at, key * cos + turned * sin)
    return cache.sum(-1)


def route(x: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = torch.softmax(x, -1).topk(2, -1)
    return weights / weights.sum(-1, keepdim=True), chosen


@dataclass(frozen=True)
class Example:
    """A small program. inputs: dtypes and shapes, as the page has them. weights: positions of those that
    nobody writes, of a kernel in a row of others. boxed: a buffer that is loaded through a descriptor."""

    fn: Callable[..., Any]
    inputs: str
    gradients: bool = False
    weights: tuple[int, ...] = ()
    boxed: str | None = None

    def __str__(self) -> str:
        return f"{'gradients of ' if self.gradients else ''}{self.fn.__name__}, {self.inputs}"

    def kernels(self) -> list[str]:
        """The texts of every candidate of every cluster, those of one candidate as one."""
        described = re.findall(r"(\w+) \[([\d, ]*)\]", self.inputs)
        with FakeTensorMode():
            tensors = [
                torch.empty([int(n) for n in shape.split(",")], dtype=getattr(torch, dtype), device="cuda")
                for dtype, shape in described
            ]
            for tensor in tensors:
                tensor.requires_grad_(self.gradients and tensor.is_floating_point())
            plans = fc.explain(self.fn, *tensors, device=DEVICE).plans
        texts: list[str] = []
        for plan in plans:
            placeholders = [node.name for node in plan.dag.module.graph.nodes if node.op == "placeholder"]
            for cluster in plan.clusters:
                constants = tuple(placeholders[i] for i in self.weights) or None
                key = canonical(replace(cluster, constants=constants), plan.dag)
                buffers = {b.name: b for b in key.buffers}
                device = device_spec(DEVICE)
                if self.boxed is None:
                    programs = emit(key.nests, cluster.name, "", buffers, device, constants=key.constants)
                else:
                    placement = schedules_of(key.nests[0], cluster.name, device)[0]
                    assert isinstance(placement, Placement)
                    through = (*placement.directives, Via(self.boxed, Access.DESCRIPTOR))
                    placement = replace(placement, directives=through)
                    programs = (program_of(key.nests, placement, cluster.name, "", buffers, device),)
                texts += ["\n".join(kernel.source for kernel in p.kernels) for p in programs]
        return [re.sub(r"test_techniques\.py:\d+", "model.py:7", text) for text in texts]


EXAMPLES = {
    "Persistent rows": Example(rms_norm, "bfloat16 [8192, 4096], bfloat16 [4096]", gradients=True),
    "Merged axes": Example(add_heads, "bfloat16 [8, 1024, 4096], bfloat16 [8, 1024, 4096]"),
    "Index-set splitting": Example(concatenation, "bfloat16 [8192, 4096], bfloat16 [8192, 4096]"),
    "Stores into memory that exists": Example(
        store_keys,
        "bfloat16 [32, 8192, 128], bfloat16 [32, 1, 128], bfloat16 [128], bfloat16 [128], int64 [1]",
    ),
    "Block window": Example(bias_of_channels, "bfloat16 [32, 512, 64, 64], bfloat16 [512]"),
    "Runs": Example(product_of_nibbles, "bfloat16 [1, 2048], uint8 [4096, 1024], bfloat16 [4096, 16]"),
    "Interleaved": Example(
        rotary_of_pairs, "bfloat16 [4, 2048, 32, 128], bfloat16 [2048, 1, 64], bfloat16 [2048, 1, 64]"
    ),
    "Misaligned rows": Example(softmax, "bfloat16 [8192, 531]"),
    "Boxes": Example(depthwise, "bfloat16 [128, 7, 7, 1152], bfloat16 [1152, 1, 5, 5]", boxed="buffer0"),
    "Peeled ends": Example(sum_of_squares, "float32 [8192, 50257]"),
    "Online reductions": Example(softmax, "bfloat16 [4096, 32768]"),
    "Scans": Example(decays, "float32 [8192, 1024]", gradients=True),
    "Elements beside rows": Example(route, "float32 [4096, 64]"),
    "Corrected moments": Example(layer_norm, "float32 [8192, 4096]"),
    "Running moments": Example(layer_norm, "bfloat16 [8192, 65536]"),
    "Sums made together": Example(
        layer_norm_with_weights, "bfloat16 [8192, 4096], bfloat16 [4096], bfloat16 [4096]", gradients=True
    ),
    "Sums over different axes": Example(
        group_norm, "bfloat16 [32, 512, 32, 32], bfloat16 [512], bfloat16 [512]", gradients=True
    ),
    "The last program": Example(mean_of_maxima, "bfloat16 [2048, 4096]"),
    "Exchange": Example(softmax, "bfloat16 [16, 262144]"),
    "Rematerialization": Example(softmax, "bfloat16 [4096, 32768]", gradients=True),
    "Matrix-vector products": Example(
        residual_product, "bfloat16 [2, 2048], bfloat16 [8192, 2048], bfloat16 [2, 8192]"
    ),
    "Early turns": Example(
        residual_product, "bfloat16 [1, 8192], bfloat16 [2048, 8192], bfloat16 [1, 2048]", weights=(1,)
    ),
    "Factors of words": Example(
        product_of_nibbles, "bfloat16 [1, 2048], uint8 [4096, 1024], bfloat16 [4096, 16]"
    ),
    "Norms in front of products": Example(
        normed_rows_product, "bfloat16 [8, 2048], bfloat16 [2048], bfloat16 [8192, 2048]"
    ),
    "Replicated reductions": Example(
        normed_product, "bfloat16 [1, 1024], bfloat16 [1024], bfloat16 [1024, 4096]"
    ),
    "Horizontal fusion": Example(
        bias_gradients, "bfloat16 [4096, 1024], bfloat16 [1024, 1024], bfloat16 [1024, 256]"
    ),
    "Stored where rounded": Example(
        add_rms_norm, "bfloat16 [8192, 4096], bfloat16 [8192, 4096], bfloat16 [4096]"
    ),
    "Reproducible values": Example(is_maximum, "bfloat16 [8192, 4096]"),
    "Strength reduction": Example(gelu, "bfloat16 [8192, 4096]"),
    "Reciprocals": Example(softmax, "bfloat16 [8192, 4096]"),
    "Short forms": Example(swiglu, "bfloat16 [8192, 4096], bfloat16 [8192, 4096]"),
    "Floats of bytes": Example(product_of_bytes, "bfloat16 [1, 4096], int8 [4096, 4096]"),
    "Floats of bits": Example(
        product_of_nibbles, "bfloat16 [1, 2048], uint8 [4096, 1024], bfloat16 [4096, 16]"
    ),
    "Masks made again": Example(dropout, "bfloat16 [8192, 4096]", gradients=True),
    "Late checks": Example(embedding_rms_norm, "int64 [8192], bfloat16 [32000, 4096], bfloat16 [4096]"),
}


# -- the page -----------------------------------------------------------------------------------------


def pairs() -> dict[str, list[str]]:
    """Technique -> its blocks of code. A heading is the technique with the files that carry it out."""
    sections = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    blocks = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return {section.partition(" (`")[0]: blocks.findall(section) for section in sections}


def missing(block: str, text: str) -> str | None:
    """The first lines of a block that a text does not have behind those before; `...` is any lines."""
    position, text = 0, f"\n{text}"
    for lines in re.split(r"^ *\.\.\.\n", block, flags=re.MULTILINE):
        position = text.find(f"\n{lines}", position)
        if position < 0:
            return lines
        position += len(lines)
    return None


def test_each_technique_has_an_example_and_a_pair() -> None:
    by_name = pairs()
    assert list(by_name) == list(EXAMPLES)
    for name, blocks in by_name.items():
        before, after = blocks
        assert before.startswith("# before\n") and after.startswith("# after: "), name
        for block in blocks:
            ast.parse(block)
            assert block.count("\n") <= LONGEST + 1, name


@of_pinned_versions
@pytest.mark.parametrize("name", EXAMPLES)
def test_what_stands_after_is_made_now(name: str) -> None:
    example = EXAMPLES[name]
    title, _, block = pairs()[name][1].partition("\n")
    assert title == f"# after: {example}"
    kernels = example.kernels()
    margins = ("", " " * 4, " " * 8)  # of a function, its body, a loop in it
    left = {missing(textwrap.indent(block, margin), text) for margin in margins for text in kernels}
    assert None in left, f"{left}\n" + "\n".join(kernels)


@pytest.mark.parametrize(
    ("block", "has"),
    [
        ("a\nb\n", True), ("b\n...\nd\n", True), ("a\n...\nd\n", True), ("a\n  ...\nb\n", True),
        ("a\nc\n", False), ("b\na\n", False), ("d\n...\nb\n", False), ("e\n", False), (" b\n", False),
    ],
)  # fmt: skip
def test_lines_are_looked_for_in_order(block: str, has: bool) -> None:
    assert (missing(block, "a\nb\nc\nd\n") is None) == has
