"""docs/techniques.md: each excerpt is part of a kernel that the compiler generates now."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
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
from fusion_compiler.pipeline import NAMES
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
    "Horizontal fusion": Example(
        bias_gradients, "bfloat16 [4096, 1024], bfloat16 [1024, 1024], bfloat16 [1024, 256]"
    ),
    "Index-set splitting": Example(concatenation, "bfloat16 [8192, 4096], bfloat16 [8192, 4096]"),
    "Merged axes": Example(add_heads, "bfloat16 [8, 1024, 4096], bfloat16 [8, 1024, 4096]"),
    "Persistent rows": Example(rms_norm, "bfloat16 [8192, 4096], bfloat16 [4096]", gradients=True),
    "Values shared by a block": Example(bias_of_channels, "bfloat16 [32, 512, 64, 64], bfloat16 [512]"),
    "Repeated elements": Example(
        product_of_nibbles, "bfloat16 [1, 2048], uint8 [4096, 1024], bfloat16 [4096, 16]"
    ),
    "Interleaved elements": Example(
        rotary_of_pairs, "bfloat16 [4, 2048, 32, 128], bfloat16 [2048, 1, 64], bfloat16 [2048, 1, 64]"
    ),
    "Misaligned rows": Example(softmax, "bfloat16 [8192, 531]"),
    "Peeled remainder": Example(sum_of_squares, "float32 [8192, 50257]"),
    "Online reductions": Example(softmax, "bfloat16 [4096, 32768]"),
    "Running moments": Example(layer_norm, "bfloat16 [8192, 65536]"),
    "Corrected moments": Example(layer_norm, "float32 [8192, 4096]"),
    "Joined reductions": Example(
        layer_norm_with_weights, "bfloat16 [8192, 4096], bfloat16 [4096], bfloat16 [4096]", gradients=True
    ),
    "Scans": Example(decays, "float32 [8192, 1024]", gradients=True),
    "Top-k by search": Example(route, "float32 [4096, 64]"),
    "Last program reduces": Example(mean_of_maxima, "bfloat16 [2048, 4096]"),
    "Shared rows": Example(softmax, "bfloat16 [16, 262144]"),
    "Recomputation after a wait": Example(softmax, "bfloat16 [4096, 32768]", gradients=True),
    "Reductions over different axes": Example(
        group_norm, "bfloat16 [32, 512, 32, 32], bfloat16 [512], bfloat16 [512]", gradients=True
    ),
    "Products of few rows": Example(
        residual_product, "bfloat16 [2, 2048], bfloat16 [8192, 2048], bfloat16 [2, 8192]"
    ),
    "Common factors of a word": Example(
        product_of_nibbles, "bfloat16 [1, 2048], uint8 [4096, 1024], bfloat16 [4096, 16]"
    ),
    "Norms before products": Example(
        normed_rows_product, "bfloat16 [8, 2048], bfloat16 [2048], bfloat16 [8192, 2048]"
    ),
    "Replicated reductions": Example(
        normed_product, "bfloat16 [1, 1024], bfloat16 [1024], bfloat16 [1024, 4096]"
    ),
    "Tensor descriptors": Example(
        depthwise, "bfloat16 [128, 7, 7, 1152], bfloat16 [1152, 1, 5, 5]", boxed="buffer0"
    ),
    "Stored where rounded": Example(
        add_rms_norm, "bfloat16 [8192, 4096], bfloat16 [8192, 4096], bfloat16 [4096]"
    ),
    "Reproducible values": Example(is_maximum, "bfloat16 [8192, 4096]"),
    "Approximate functions": Example(swiglu, "bfloat16 [8192, 4096], bfloat16 [8192, 4096]"),
    "Complements": Example(gelu, "bfloat16 [8192, 4096]"),
    "Reciprocals": Example(softmax, "bfloat16 [8192, 4096]"),
    "Bytes to floats": Example(product_of_bytes, "bfloat16 [1, 4096], int8 [4096, 4096]"),
    "Packed bits to floats": Example(
        product_of_nibbles, "bfloat16 [1, 2048], uint8 [4096, 1024], bfloat16 [4096, 16]"
    ),
    "Index checks at the end": Example(
        embedding_rms_norm, "int64 [8192], bfloat16 [32000, 4096], bfloat16 [4096]"
    ),
    "Writes in place": Example(
        store_keys,
        "bfloat16 [32, 8192, 128], bfloat16 [32, 1, 128], bfloat16 [128], bfloat16 [128], int64 [1]",
    ),
    "Recomputed dropout masks": Example(dropout, "bfloat16 [8192, 4096]", gradients=True),
    "Dependent launch": Example(
        residual_product, "bfloat16 [1, 8192], bfloat16 [2048, 8192], bfloat16 [1, 2048]", weights=(1,)
    ),
}


# -- the page -----------------------------------------------------------------------------------------


def sections() -> dict[str, str]:
    """Return the text of each technique by its heading."""
    return dict(re.findall(r"^### ([^\n]*)\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE))


def examples() -> dict[str, list[str]]:
    """Return the Python blocks of each technique that has some: plain Triton, if shown, and the excerpt."""
    block = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    blocks = {name: block.findall(text) for name, text in sections().items()}
    return {name: of_technique for name, of_technique in blocks.items() if of_technique}


def missing(block: str, text: str) -> str | None:
    """The first lines of a block that a text does not have behind those before; `...` is any lines."""
    position, text = 0, f"\n{text}"
    for lines in re.split(r"^ *\.\.\.\n", block, flags=re.MULTILINE):
        position = text.find(f"\n{lines}", position)
        if position < 0:
            return lines
        position += len(lines)
    return None


def test_each_example_of_the_page_is_a_program_of_this_test() -> None:
    assert list(examples()) == list(EXAMPLES)
    for name, blocks in examples().items():
        *before, after = blocks
        assert len(before) <= 1 and all(block.startswith("# before\n") for block in before), name
        assert after.startswith("# after: "), name
        for block in blocks:
            ast.parse(block)
            assert block.count("\n") <= LONGEST + 1, name


def test_each_technique_says_when_it_applies_and_where_it_is() -> None:
    for name, text in sections().items():
        assert re.search(r"\*When:\* \w", text) and re.search(r"\*Code:\*\s+`[\w/]+\.py`", text), name


def test_the_page_lists_the_passes_in_order_and_turns_off_passes_and_options_that_exist() -> None:
    text = PAGE.read_text()
    table = text.partition("\n## Passes over the graph\n")[2]
    rows = re.findall(r"^\| ([\w -]+) \| .* \| `passes/.*` \|$", table, re.MULTILINE)
    assert tuple(rows) == NAMES
    disabled = {name for names in re.findall(r"disable=\((.*?)\)", text) for name in names.split('"')[1::2]}
    assert len(disabled) > 4 and disabled <= set(NAMES)
    options = set(re.findall(r"\*Off:\*\s+`(\w+)=", text))
    assert len(options) > 4 and options <= {field.name for field in fields(fc.Options)}


@of_pinned_versions
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_excerpt_is_part_of_a_generated_kernel(name: str) -> None:
    example = EXAMPLES[name]
    title, _, block = examples()[name][-1].partition("\n")
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
