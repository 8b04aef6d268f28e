"""Reductions that read reductions over the same axis, made in one loop, in Triton's interpreter and beside
float64."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion_compiler.codegen import assemble, live_loops
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.kernel import Program
from fusion_compiler.ir.loops import COLS, INNER, Value
from fusion_compiler.runtime.launch import interpret
from fusion_compiler.runtime.target import compile_for
from fusion_compiler.schedule.carried import Carried, carried_of
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.separated import separated
from fusion_compiler.schedule.space import schedules
from fusion_compiler.schedule.verifier import refusal
from tests.exactness import not_as_close, wide
from tests.schedule import attention_nests as nests
from tests.schedule.attention_nests import Chain, Variant

H200 = device_spec("h200")
KEYS = 56
SIZES = (2, 2, 40, 32, KEYS, 16)
VARIANTS = {
    "softmax": nests.scaled(0.25),
    "soft-capped and causal": nests.soft_capped_causal(0.25, 5.0),
    "ALiBi": nests.causal(nests.alibi(0.25)),
    "bias": nests.biased(0.25),
    "window": nests.window(nests.scaled(0.25), 9),
    "padding": nests.padded(nests.scaled(0.25)),
    "sinks": nests.with_sink(nests.window(nests.scaled(0.25), 9)),
    "sinks beside padding": nests.with_sink(nests.padded(nests.scaled(0.25))),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def placement(rows: int, keys: int, on_tensor_cores: bool = True) -> Placement:
    units = "unit(t, TENSOR_CORE); unit(o, TENSOR_CORE); " if on_tensor_cores else ""
    return Placement.parse(
        f"split(i, {rows}); split(j, {keys}); place(b, GRID); place(h, GRID); place(i.o, GRID); "
        "place(j.o, LOOP); place(i.i, LANES); place(j.i, LANES); place(d, LANES); place(e, LANES); "
        f"{units}combine(l, CARRIED); combine(o, CARRIED); 4 warps"
    )


def built(nest: Chain, place: Placement) -> Program:
    loops = nest.nest()
    assert refusal(loops, place) is None
    return assemble.build(assemble.Nests((loops,), nest.memory()), (place,), "attention", "")


def drawn(nest: Chain, scale: float = 2.0) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype) in nest.tensors.items():
        if dtype.is_floating_point:
            tensors[name] = (torch.randn(shape) * scale).to(dtype)
        else:
            tensors[name] = torch.tensor([0, *(random.randint(1, KEYS) for _ in shape[1:] or (1,))])
    return tensors


def run(program: Program, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return interpret(program, [tensors[buffer.name] for buffer in program.inputs], [])


def compare(variant: Variant, nest: Chain, place: Placement, tensors: dict[str, Tensor]) -> None:
    ours = run(built(nest, place), tensors)
    inputs = {name: tensors[name] for name in ("q", "k", "v", *variant.inputs)}
    eager, truth = nests.plain(variant, **inputs), nests.plain(variant, **wide(inputs))
    for one, theirs, exact in zip(ours, eager, truth, strict=True):
        assert not (wrong := not_as_close(one, theirs.to(one.dtype), exact)), wrong


@pytest.mark.sample(16)
@pytest.mark.parametrize("on_tensor_cores", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_attention_is_as_close_to_float64_as_eager(
    name: str, dtype: torch.dtype, on_tensor_cores: bool
) -> None:
    nest = nests.attention(VARIANTS[name], dtype, *SIZES)
    compare(VARIANTS[name], nest, placement(16, 16, on_tensor_cores), drawn(nest))


@pytest.mark.sample(6)
@pytest.mark.parametrize("keys", [1, 16, 31, 32, 48])
@pytest.mark.parametrize("queries", [1, 16, 17])
def test_lengths_that_are_no_multiple_of_a_block(queries: int, keys: int) -> None:
    variant = nests.padded(nests.scaled(0.25))
    nest = nests.attention(variant, torch.float32, 2, 2, queries, 16, keys, 16)
    compare(variant, nest, placement(16, 16), drawn(nest) | {"length": torch.tensor([0, keys])})


@pytest.mark.parametrize("on_tensor_cores", [True, False])
def test_large_and_infinite_scores(on_tensor_cores: bool) -> None:
    """A score of +inf makes its row NaN, as eager does; one of -inf has no weight."""
    variant = nests.biased(1.0)
    nest = nests.attention(variant, torch.float32, *SIZES)
    tensors = drawn(nest, 40.0)
    tensors["bias"][0, 3, 5] = math.inf
    tensors["bias"][0, 4, 50] = math.inf
    tensors["bias"][0, 5, :] = -math.inf
    tensors["bias"][1, 6, :55] = -math.inf
    tensors["bias"][1, 7, 20] = math.nan
    tensors["bias"][1, 8, :] = torch.linspace(-3e38, 3e38, KEYS)
    compare(variant, nest, placement(16, 16, on_tensor_cores), tensors)


def test_scores_that_grow_from_block_to_block() -> None:
    """Each block rescales all that was added up before it."""
    variant = nests.alibi(0.01)
    nest = nests.attention(variant, torch.float32, *SIZES)
    for slope in (0.01, 1.0, 30.0):
        tensors = drawn(nest) | {"slope": torch.tensor([slope, -slope])}
        compare(variant, nest, placement(16, 16), tensors)


def causal_window(size: int) -> Variant:
    return nests.window(nests.causal(nests.scaled(0.25)), size)


MASKS = {
    "causal": nests.causal(nests.scaled(0.25)),
    "window": nests.window(nests.scaled(0.25), 20),
    "long window": nests.window(nests.scaled(0.25), 75),
    "causal window": causal_window(33),
    "padding": nests.causal(nests.padded(nests.scaled(0.25))),
    "future": nests.masked(
        nests.scaled(0.25),
        lambda nest: nest.compare("lt.Tensor", nest.place("i"), nest.place("j")),
        lambda i, j: i < j,
    ),
    "shifted": nests.masked(
        nests.scaled(0.25),
        lambda nest: nest.compare("ge.Tensor", nest.op("add.Tensor", nest.place("i"), 21), nest.place("j")),
        lambda i, j: i + 21 >= j,
    ),
    "first keys": nests.masked(
        nests.scaled(0.25),
        lambda nest: nest.compare("gt.Scalar", nest.place("j"), 40),
        lambda i, j: j > 40,
    ),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("blocks", [(16, 16), (32, 16), (16, 32), (64, 16)], ids=str)
def test_blocks_that_no_query_sees_are_not_visited(name: str, blocks: tuple[int, int]) -> None:
    """Values of such blocks may be NaN, which a weight of zero does not hide."""
    queries, keys = random.choice([(96, 96), (40, 120), (120, 56), (64, 64)])
    nest = nests.attention(MASKS[name], torch.float32, 1, 2, queries, 16, keys, 16)
    tensors = drawn(nest) | {"length": torch.tensor([random.randint(1, keys)])}
    compare(MASKS[name], nest, placement(*blocks), tensors)
    if name == "causal" and keys > (end := -(-queries // 64) * 64):
        dead = torch.nn.functional.pad(torch.zeros(end), (0, keys - end), value=math.nan)
        (out, _) = run(built(nest, placement(*blocks)), tensors | {"v": tensors["v"] + dead[:, None]})
        assert out.isfinite().all()


def read_mask(target: str, holds: Callable[[Tensor, Tensor], Tensor], is_causal: bool = True) -> Variant:
    """Return scores where numbers of a row and of a key, which lie in memory, compare in some way."""

    def mask(nest: Chain) -> Value:
        row, key = (nest.tensor(f"of_{axis}", "b", axis, dtype=torch.int64) for axis in "ij")
        return nest.compare(target, row, key)

    def plain(i: Tensor, j: Tensor, of_i: Tensor, of_j: Tensor) -> Tensor:
        return holds(of_i[:, None, :, None], of_j[:, None, None, :])

    scores = nests.scaled(0.25)
    return nests.masked(nests.causal(scores) if is_causal else scores, mask, plain, of_i="bi", of_j="bj")


READ = {
    "eq.Tensor": operator.eq,
    "ge.Tensor": operator.ge,
    "gt.Tensor": operator.gt,
    "le.Tensor": operator.le,
    "lt.Tensor": operator.lt,
    "ne.Tensor": operator.ne,
}


@pytest.mark.parametrize("target", READ)
@pytest.mark.parametrize("are_sorted", [True, False])
def test_masks_in_memory_bound_a_loop(target: str, are_sorted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents, packed positions and the like, where some rows see nothing."""
    monkeypatch.setattr(live_loops, "SCANNED", 32)
    variant = read_mask(target, READ[target])
    nest = nests.attention(variant, torch.float32, 2, 2, 96, 16, 120, 16)
    tensors = drawn(nest) | {"of_i": torch.randint(-3, 6, (2, 96)), "of_j": torch.randint(-4, 5, (2, 120))}
    if are_sorted:
        tensors |= {name: tensors[name].sort(-1).values for name in ("of_i", "of_j")}
    place = placement(16, 16)
    compare(variant, nest, place, tensors)
    assert ("first_seen" in built(nest, place).kernels[0].source) == (target != "ne.Tensor")


def test_masks_in_memory_beside_tensors_that_need_64_bits_compile() -> None:
    variant = read_mask("eq.Tensor", operator.eq)
    nest = nests.attention(variant, torch.bfloat16, 64, 64, 16384, 64, 16384, 64)
    kernel = built(nest, placement(64, 64)).kernels[0]
    assert "tl.int64" in kernel.source and "first_seen" in kernel.source
    compile_for(kernel, "sm_90")


@pytest.mark.parametrize("is_hidden", [False, True])
def test_masks_of_keys_bound_a_loop(is_hidden: bool) -> None:
    def mask(nest: Chain) -> Value:
        keys = nest.tensor("keys", "b", "j", dtype=torch.bool)
        return nest.op("bitwise_not.default", keys, dtype=torch.bool) if is_hidden else keys

    def plain(i: Tensor, j: Tensor, keys: Tensor) -> Tensor:
        return (keys != is_hidden)[:, None, None, :]

    variant = nests.masked(nests.scaled(0.25), mask, plain, keys="bj")
    nest = nests.attention(variant, torch.float32, 4, 2, 48, 16, 120, 16)
    shown = torch.zeros(4, 120, dtype=torch.bool)
    shown[0, 37:90] = torch.rand(53) < 0.5
    shown[1, 100:] = True
    shown[2, : random.randint(1, 120)] = True
    tensors = drawn(nest) | {"keys": shown != is_hidden}
    compare(variant, nest, placement(16, 16), tensors)
    assert "first_seen" in built(nest, placement(16, 16)).kernels[0].source


@pytest.mark.sample(12)
@pytest.mark.parametrize("target", ["eq.Tensor", "ge.Tensor", "lt.Tensor"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [96, 120, 200])
def test_blocks_that_all_rows_see_are_a_loop_without_masks(
    target: str, is_causal: bool, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few documents, of which some end within a block of rows."""
    monkeypatch.setattr(live_loops, "SCANNED", 64)
    variant = read_mask(target, READ[target], is_causal)
    nest = nests.attention(variant, torch.float32, 3, 1, length, 16, length, 16)
    place, ends = placement(16, 16), torch.randint(0, length, (3, 2))
    documents = sum(torch.arange(length) >= end for end in ends.split(1, dim=1)).to(torch.int64)
    of_keys = documents if target == "eq.Tensor" else documents * 2 - 1
    compare(variant, nest, place, drawn(nest) | {"of_i": documents, "of_j": of_keys})
    *_, bare, rest = built(nest, place).kernels[0].source.split("in tl.range(")
    assert bare.count("where") < rest.count("where")


def test_masks_of_rows_leave_each_program_its_own_part_of_a_loop() -> None:
    """Programs that share the keys go through a part of them each, also where a row may see nothing."""

    def mask(nest: Chain) -> Value:
        return nest.tensor("rows", "b", "i", dtype=torch.bool)

    def plain(i: Tensor, j: Tensor, rows: Tensor) -> Tensor:
        return rows[:, None, :, None]

    variant = nests.masked(nests.scaled(0.25), mask, plain, rows="bi")
    nest = nests.attention(variant, torch.float32, 2, 2, 40, 16, 128, 16)
    place = Placement.parse(
        str(placement(16, 16))
        .replace("split(j, 16)", "split(j, 64); split(j.i, 16)")
        .replace("place(j.o, LOOP)", "place(j.o, GRID); place(j.i.o, LOOP)")
        .replace("place(j.i, LANES)", "place(j.i.i, LANES)")
    )
    compare(variant, nest, place, drawn(nest) | {"rows": torch.rand(2, 40) < 0.9})


def test_blocks_before_and_behind_all_documents_of_a_program_are_not_visited() -> None:
    variant = read_mask("eq.Tensor", operator.eq)
    nest = nests.attention(variant, torch.float32, 1, 2, 96, 16, 96, 16)
    documents = torch.arange(96)[None] // 32
    is_dead = torch.zeros(96)
    is_dead[:32] = math.nan
    tensors = drawn(nest) | {"of_i": documents, "of_j": documents}
    (out, _) = run(built(nest, placement(16, 16)), tensors | {"v": tensors["v"] + is_dead[:, None]})
    assert out[:, :, 32:].isfinite().all() and out[:, :, :32].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_gradient_of_queries_is_a_chain_without_a_carried_reduction(dtype: torch.dtype) -> None:
    """In float32, the row sums `delta` cancel less exactly than eager's: graphs do not use them there."""
    nest = nests.gradient_of_queries(MASKS["causal"], dtype, 1, 2, 192, 16, 192, 32, 16)
    placements = schedules(nest.nest(), H200)
    q, k, v, do = (drawn(nest, 1.0)[name] for name in ("q", "k", "v", "do"))
    inputs = {"q": q, "k": k, "v": v}
    truth = {name: tensor.double().requires_grad_() for name, tensor in inputs.items()}
    out, lse = nests.plain(MASKS["causal"], **truth)
    out.backward(do.double())
    eager = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    nests.plain(MASKS["causal"], **eager)[0].backward(do)
    delta = (out * do.double()).sum(-1)
    tensors = inputs | {"do": do, "lse": lse.detach().float(), "delta": delta.detach().float()}
    for place in random.sample(placements, 2):
        (dq,) = run(built(nest, place), tensors)
        exact, theirs = truth["q"].grad, eager["q"].grad
        assert exact is not None and theirs is not None
        wrong = not_as_close(dq, (theirs.double() * 4).to(dtype), exact * 4)  # without the scale
        assert not wrong, wrong


@pytest.mark.parametrize("name", ["soft-capped and causal", "ALiBi"])
def test_the_placements_of_chains_are_right(name: str) -> None:
    nest = nests.attention(VARIANTS[name], torch.bfloat16, 1, 2, 192, 64, 256, 64)
    placements = schedules(nest.nest(), H200)
    assert all("combine(o, CARRIED)" in str(place) for place in placements)
    compare(VARIANTS[name], nest, random.choice(placements), drawn(nest, 1.0))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["softmax", "padding", "sinks", "sinks beside padding"])
@pytest.mark.parametrize("chunk", [16, 32])
def test_parts_of_a_loop_are_merged_by_the_same_law(name: str, chunk: int) -> None:
    """Programs that have parts of the keys store their maxima and sums, which a second kernel rescales."""
    nest = nests.attention(VARIANTS[name], torch.float32, 2, 2, 4, 16, KEYS, 16)
    place = Placement.parse(
        f"split(j, {chunk}); split(j.i, 16); place(b, GRID); place(h, GRID); place(j.o, GRID); "
        "place(j.i.o, LOOP); place(i, LANES); place(j.i.i, LANES); place(d, LANES); place(e, LANES); "
        "combine(l, CARRIED); combine(o, CARRIED); 4 warps"
    )
    assert len(built(nest, place).kernels) == 2
    tensors = drawn(nest)
    if "sink" in tensors:
        tensors["sink"] = torch.tensor([20.0, -20.0])
    compare(VARIANTS[name], nest, place, tensors)


def test_few_queries_occupy_the_device() -> None:
    nest = nests.attention(VARIANTS["softmax"], torch.bfloat16, 1, 2, 16, 64, 2048, 64)
    place = schedules(nest.nest(), H200)[0]
    assert "place(j.o, GRID)" in str(place)
    compare(VARIANTS["softmax"], nest, place, drawn(nest, 1.0))


def log_softmax(nest: Chain, name: str) -> Value:
    """Return the logarithms of the softmax of an input [i, j] along j."""
    x = nest.tensor(name, "i", "j", dtype=torch.float32)
    y = nest.sub(x, nest.call(f"m_{name}", nest.over("max", x, "j")))
    total = nest.call(f"l_{name}", nest.over("sum", nest.exp(y), "j"))
    return nest.sub(y, nest.op("log.default", total))


def entropy(nest: Chain) -> Value:
    p = log_softmax(nest, "x")
    return nest.mul(nest.exp(p), p)


def divergence(nest: Chain) -> Value:
    p, q = log_softmax(nest, "x"), log_softmax(nest, "y")
    return nest.mul(nest.exp(p), nest.sub(p, q))


def differential(nest: Chain) -> Value:
    v = nest.tensor("v", "j", "e", dtype=torch.float32)
    p, q = (nest.exp(log_softmax(nest, name)) for name in ("x", "y"))
    return nest.mul(nest.sub(p, nest.mul(q, nest.constant(0.3))), v)


def cosine(nest: Chain) -> Value:
    """Two norms before a product: nothing is carried, since they are taken out of the sum."""
    x, y = (nest.tensor(name, "i", "j", dtype=torch.float32) for name in "xy")
    x, y = (nest.div(z, nest.op("sqrt.default", nest.over("sum", nest.mul(z, z), "j"))) for z in (x, y))
    return nest.mul(x, y)


OF_ROWS: dict[str, tuple[Callable[[Chain], Value], Callable[..., Tensor]]] = {
    "entropy": (entropy, lambda x: (x.softmax(-1) * x.log_softmax(-1)).sum(-1)),
    "divergence": (
        divergence,
        lambda x, y: (x.softmax(-1) * (x.log_softmax(-1) - y.log_softmax(-1))).sum(-1),
    ),
    "cosine": (cosine, lambda x, y: torch.nn.functional.cosine_similarity(x, y)),
    "differential": (differential, lambda x, y, v: (x.softmax(-1) - 0.3 * y.softmax(-1)) @ v),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("offset", [0.0, 300.0])
@pytest.mark.parametrize("chunk", [0, 32])
def test_terms_of_rank_two_take_one_reading(name: str, offset: float, chunk: int) -> None:
    terms, plain = OF_ROWS[name]
    nest = Chain({"i": (6, COLS), "e": (16, COLS), "j": (90, INNER)})
    axes = ("i", "e") if name == "differential" else ("i",)
    nest.result("out", nest.call("r", nest.over("sum", terms(nest), "j")), *axes, dtype=torch.float32)
    loops = separated(nest.nest())
    carried = [loops.names[n] for n in range(len(loops.nodes)) if isinstance(carried_of(loops, n), Carried)]
    split, part = (f"split(j, {chunk}); place(j.o, GRID); ", "j.i") if chunk else ("", "j")
    place = Placement.parse(
        f"{split}split({part}, 16); place({part}.o, LOOP); place(i, LANES); place({part}.i, LANES); "
        f"place(e, LANES); {''.join(f'combine({name}, CARRIED); ' for name in carried)}4 warps"
    )
    assert refusal(loops, place) is None
    program = assemble.build(assemble.Nests((loops,), nest.memory()), (place,), name, "")
    assert program.kernels[0].source.count("tl.range(0,") == 1  # a second loop has the end
    tensors = drawn(nest)
    tensors |= {x: tensors[x] + offset for x in ("x", "y") if x in tensors}
    (ours,) = run(program, tensors)
    inputs = [tensors[x] for x in ("x", "y", "v") if x in tensors]
    wrong = not_as_close(ours, plain(*inputs), plain(*wide(inputs)))
    assert not wrong, wrong


def test_a_causal_loop_has_a_part_without_masks() -> None:
    nest = nests.attention(nests.soft_capped_causal(0.25, 5.0), torch.bfloat16, 2, 2, 256, 16, 256, 16)
    (kernel,) = built(nest, placement(32, 16)).kernels
    first, second = kernel.source.split("for first_j in ")[1:]
    assert first.startswith("tl.range(0, i_o * 32, 16)") and "<=" not in first
    assert second.startswith("tl.range(i_o * 32, i_o * 32 + 32, 16)") and second.count("<=") == 1
    assert first.count("tl.dot") == second.count("tl.dot") == 2


@pytest.mark.parametrize("head", [128, 256])
def test_tiles_of_a_chain_fit_into_shared_memory(head: int) -> None:
    sizes = (1, 2, 1024, head, 1024, head, head)
    nest = nests.gradient_of_queries(MASKS["causal"], torch.bfloat16, *sizes)
    binary = compile_for(built(nest, schedules(nest.nest(), H200)[0]).kernels[0], "sm_90")
    assert binary.spills == 0 and 64 * 1024 < binary.shared_bytes <= H200.shared_bytes_of_program


@pytest.mark.parametrize(("head", "warps"), [(64, 4), (128, 4), (128, 8)])
def test_attention_compiles_without_spills(head: int, warps: int) -> None:
    """For a Hopper GPU, with tensor cores that read shared memory."""
    variant = nests.soft_capped_causal(head**-0.5, 50.0)
    nest = nests.attention(variant, torch.bfloat16, 2, 16, 4096, head, 4096, head)
    place = next(p for p in schedules(nest.nest(), H200) if p.num_warps == warps)
    binary = compile_for(built(nest, place).kernels[0], "sm_90")
    assert binary.spills == 0 and "wgmma.mma_async" in binary.asm["ptx"]
