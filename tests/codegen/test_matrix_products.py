"""Products of matrices with many rows on tensor cores: what their kernels compute in Triton's interpreter,
with what the nest computes before and behind them, and what they become on GPUs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_compiler.codegen.emit import emit
from fusion_compiler.ir.device import GEMM_SHARE, device_spec
from fusion_compiler.ir.loops import COLS, INNER, Index, InRange, Load, Value
from fusion_compiler.runtime.launch import interpret
from fusion_compiler.runtime.target import compile_for
from fusion_compiler.schedule import verifier
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.cost import Roofline
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.space import cheapest, refusal, schedules
from fusion_compiler.schedule.tile_products import with_exact_products
from tests.matrices import Products

H200, A100 = device_spec("h200"), device_spec("a100")
HALVES = (torch.bfloat16, torch.float16)


def draw(rows: int = 40, cols: int = 40, terms: int = 30) -> tuple[int, int, int]:
    """Random sizes of at least these, of which most fill no tile."""
    m, n, k = (random.choice([n, random.randint(n, n + 120), n + -n % 64]) for n in (rows, cols, terms))
    return m, n, k


def placements(nest: Products, count: int = 2) -> list[Placement]:
    """The best placements of a nest, and others by chance."""
    loops, buffers = nest.nest(), nest.memory()
    best = [p for p in schedules(loops, H200) if verifier.refusal(loops, p, buffers, H200) is None]
    assert best, refusal(Analysis(loops), H200)
    return [best[0], *random.sample(best[1:], min(count - 1, len(best) - 1))]


def distance(ours: Tensor, exact: Tensor) -> float:
    assert ours.shape == exact.shape and ours.isfinite().all()
    return float((ours.double() - exact).abs().max()) if exact.numel() else 0.0


def compare(
    nest: Products, f: Callable[..., Tensor | tuple[Tensor, ...]], count: int = 2, wide: float = 1.0
) -> None:
    """The nest's results, in the order of its stores, are as close to those of `f` in float64 as eager's are.

    f: called with the nest's inputs in the order of their names.
    """
    inputs = nest.inputs(wide=wide)
    exact, eager = (
        f(*(change(inputs[name]) for name in sorted(inputs))) for change in (Tensor.double, Tensor.clone)
    )
    pairs = list(zip(*(x if isinstance(x, tuple) else (x,) for x in (exact, eager)), strict=True))
    for placement in placements(nest, count):
        results = nest.run(placement, inputs)
        names = dict.fromkeys(store.buffer for store in nest.stores)
        for name, (truth, theirs) in zip(names, pairs, strict=True):
            slack = 1e-6 * (1 + float(truth.abs().max()))
            assert distance(results[name], truth) <= distance(theirs, truth) + slack, (name, str(placement))


LAYOUTS = [(a, b) for a in ("mk", "km") for b in ("kn", "nk")]


def order(x: Tensor, layout: str, want: str) -> Tensor:
    return x if layout == want else x.transpose(-2, -1)


@pytest.mark.sample(8)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_a_product_in_every_layout(layouts: tuple[str, str], dtype: torch.dtype, batch: int) -> None:
    m, n, k = random.choice([(130, 70, 200), draw(terms=16)])
    nest = Products(m, n, k, batch, dtype)
    left, right = (nest.read(name, nest.batch + layout) for name, layout in zip("ab", layouts, strict=True))
    nest.write("out", nest.product(left, right), f"{nest.batch}mn")
    compare(nest, lambda a, b: order(a, layouts[0], "mk") @ order(b, layouts[1], "kn"))


def test_a_result_that_lies_by_columns() -> None:
    """Neighbours in memory are the columns of its tiles: those of the first factor."""
    nest = Products(90, 140, 70)
    nest.write("out", nest.product(nest.read("a", "mk"), nest.read("b", "kn")), "nm")
    compare(nest, lambda a, b: (a @ b).T.contiguous())


def gelu(nest: Products, x: Value) -> Value:
    erf = nest.op("erf.default", nest.op("mul.Scalar", x, 0.5**0.5))
    return nest.mul(nest.op("mul.Scalar", x, 0.5), nest.op("add.Scalar", erf, 1.0))


def gelu_tanh(nest: Products, x: Value) -> Value:
    cube = nest.mul(x, nest.mul(x, x))
    inner = nest.op("mul.Scalar", nest.add(x, nest.op("mul.Scalar", cube, 0.044715)), (2 / torch.pi) ** 0.5)
    return nest.mul(nest.op("mul.Scalar", x, 0.5), nest.op("add.Scalar", nest.op("tanh.default", inner), 1.0))


def silu(nest: Products, x: Value) -> Value:
    return nest.mul(x, nest.op("sigmoid.default", x))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_bias_and_gelu_behind_it(approximate: str, dtype: torch.dtype) -> None:
    nest = Products(*draw(), dtype=dtype)
    y = nest.add(nest.product(nest.read("a", "mk"), nest.read("b", "nk")), nest.read("c", "n"))
    nest.write("out", (gelu if approximate == "none" else gelu_tanh)(nest, y), "mn")
    compare(nest, lambda a, b, c: F.gelu(F.linear(a, b, c), approximate=approximate))


def test_a_residual_behind_it_and_the_product_beside_it() -> None:
    nest = Products(*draw())
    y = nest.product(nest.read("a", "mk"), nest.read("b", "nk"))
    nest.write("out", nest.add(y, nest.read("r", "mn")), "mn")
    nest.write("kept", y, "mn")
    compare(nest, lambda a, b, r: (a @ b.T + r, a @ b.T))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_two_products_that_share_a_factor(dtype: torch.dtype) -> None:
    nest = Products(*draw(), dtype=dtype)
    a = nest.read("a", "mk")
    gate, up = (nest.product(a, nest.read(name, "nk")) for name in ("b", "c"))
    nest.write("out", nest.mul(silu(nest, gate), up), "mn")
    compare(nest, lambda a, b, c: F.silu(a @ b.T) * (a @ c.T))
    program = nest.program(placements(nest)[0])
    assert program.kernels[0].source.count("in tl.range(") <= 1, "one loop makes both"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_is_computed_of_a_factor(dtype: torch.dtype) -> None:
    """Scales of rows and of terms in front of the product, rounded as eager rounds them."""
    nest = Products(*draw(), dtype=dtype)
    a = nest.mul(nest.mul(nest.read("a", "mk"), nest.read("b", "m", torch.float32)), nest.read("c", "k"))
    nest.write("out", nest.product(nest.rounded(a), nest.read("d", "nk")), "mn")
    compare(nest, lambda a, b, c, d: (a.to(b.dtype) * b[:, None] * c).to(d.dtype) @ d.T)


def test_a_norm_before_it() -> None:
    """The statistics of a row are sums over the terms in a loop of their own."""
    nest = Products(*draw(terms=100))
    a = nest.read("a", "mk")
    squares = nest.op("mul.Scalar", nest.summed(nest.mul(a, a), "k"), 1 / int(nest.axes["k"][0]))
    scale = nest.op("rsqrt.default", nest.op("add.Scalar", squares, 1e-5))
    left = nest.rounded(nest.mul(nest.mul(a, scale), nest.read("b", "k")))
    nest.write("out", nest.product(left, nest.read("c", "nk")), "mn")
    nest.write("scale", scale, "m", torch.float32)

    def f(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        wide = a if a.dtype is torch.float64 else a.float()
        scale = (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        return (wide * scale * b).to(c.dtype) @ c.T, scale[:, 0]

    compare(nest, f)


@pytest.mark.parametrize("held", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_weights_of_eight_bits(held: torch.dtype) -> None:
    """Weights go into tensor cores as 16-bit numbers; their scales multiply the results."""
    nest = Products(*draw())
    weight = nest.read("b", "nk", held)
    weight = weight if held.is_floating_point else nest.op("_to_copy.default", weight)
    y = nest.product(nest.read("a", "mk"), weight)
    nest.write("out", nest.mul(y, nest.read("c", "n", torch.float32)), "mn")
    compare(nest, lambda a, b, c: ((a @ b.to(a.dtype).T) * c).to(a.dtype), wide=4.0)


def test_dropout_behind_it() -> None:
    nest = Products(*draw())
    y = nest.product(nest.read("a", "mk"), nest.read("b", "nk"))
    kept = nest.op("ge.Scalar", nest.random("m", "n"), 0.3, dtype=torch.bool)
    nest.shapes["seed"], nest.dtypes["seed"] = (), torch.int64
    nest.write("out", nest.op("where.self", kept, y, nest.constant(0.0)), "mn")
    inputs = {**nest.inputs(), "seed": torch.tensor(7)}
    exact, (first, *others) = inputs["a"].double() @ inputs["b"].double().T, placements(nest, 3)
    ours = nest.run(first, inputs)["out"]
    assert 0.2 < float((ours == 0).double().mean()) < 0.4
    assert distance(torch.where(ours == 0, exact, ours.double()), exact) <= 0.01 * float(exact.abs().max())
    for placement in others:
        assert ((nest.run(placement, inputs)["out"] == 0) == (ours == 0)).all(), (
            "the same elements are dropped"
        )


def test_sums_of_the_columns_behind_it() -> None:
    """A bias' gradient: each program stores its part of the sum over the rows."""
    nest = Products(*draw(rows=140), inner="mk")
    y = nest.mul(nest.product(nest.read("a", "mk"), nest.read("b", "kn")), nest.read("c", "mn"))
    nest.write("out", y, "mn")
    nest.write("bias", nest.summed(y, "m"), "n", torch.float32)

    def f(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y = (a @ b) * c
        return y, y.sum(0, dtype=torch.promote_types(y.dtype, torch.float32))

    compare(nest, f)


def test_programs_share_the_terms_of_few_tiles() -> None:
    """The epilogue of the product is computed after the second stage."""
    nest = Products(*draw()[:2], random.randint(2000, 3000))
    y = nest.add(nest.product(nest.read("a", "mk"), nest.read("b", "kn")), nest.read("c", "n"))
    nest.write("out", gelu(nest, y), "mn")
    (split, *_) = (p for p in schedules(nest.nest(), H200) if "place(k.o, GRID)" in str(p))
    inputs = nest.inputs(wide=0.1)
    a, b, c = (inputs[name].double() for name in "abc")
    eager = F.gelu(torch.addmm(inputs["c"], inputs["a"], inputs["b"]))
    exact = F.gelu(torch.addmm(c, a, b))
    ours = nest.run(split, inputs)["out"]
    assert distance(ours, exact) <= distance(eager, exact) + 1e-6


def test_a_number_of_rows_that_is_known_at_run_time() -> None:
    rows = sympy.Symbol("s0", integer=True, positive=True)
    nest = Products(rows, 140, 70)
    y = nest.add(nest.product(nest.read("a", "mk"), nest.read("b", "nk")), nest.read("c", "n"))
    nest.write("out", y, "mn")
    for placement in placements(nest):
        for size in (1, 40, 1200):
            inputs = nest.inputs({rows: size})
            a, b, c = (inputs[name].double() for name in "abc")
            ours = nest.run(placement, inputs, [size])["out"]
            eager = F.linear(inputs["a"], inputs["b"], inputs["c"])
            assert distance(ours, a @ b.T + c) <= distance(eager, a @ b.T + c) + 1e-6


def test_a_sum_of_a_row_of_results_behind_it() -> None:
    """If a program has all columns of its results, a norm of them needs no other kernel."""
    nest = Products(*draw(cols=140), inner="kn")
    y = nest.add(nest.product(nest.read("a", "mk"), nest.read("b", "nk")), nest.read("r", "mn"))
    squares = nest.op("mul.Scalar", nest.summed(nest.mul(y, y), "n"), 1 / int(nest.axes["n"][0]))
    scale = nest.op("rsqrt.default", nest.op("add.Scalar", squares, 1e-5))
    nest.write("out", nest.mul(y, scale), "mn")

    def f(a: Tensor, b: Tensor, r: Tensor) -> Tensor:
        y = (a @ b.T + r).to(torch.promote_types(a.dtype, torch.float32))
        return (y * (y.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()).to(a.dtype)

    compare(nest, f)


def test_a_factor_that_is_read_within_a_range() -> None:
    """A shifted factor, zero where its index leaves the tensor."""
    m, n, k = draw()
    nest = Products(m, n, k)
    nest.described("a", "mk", nest.dtype)
    inside = nest.push(InRange(nest.index({"m": 1}, -3), 0, m))
    left = nest.load("a", at={"m": k, "k": 1}, const=-3 * k, within=inside)
    nest.write("out", nest.product(left, nest.read("b", "kn")), "mn")
    compare(nest, lambda a, b: F.pad(a, (0, 0, 3, 0))[:m] @ b)


def test_a_head_by_its_terms() -> None:
    """Rows, columns and terms that are several axes each: what attention's heads leave behind."""
    sizes = {"b": (3, COLS), "s": (17, COLS), "n": (70, COLS), "h": (5, INNER), "d": (24, INNER)}
    nest = Products(1, 1, 1)
    nest.axes = dict(sizes)
    left, right = nest.read("a", "bhsd"), nest.read("b", "nhd")
    nest.write("out", nest.summed(nest.mul(left, right), "hd"), "bsn")
    compare(nest, lambda a, b: torch.einsum("bhsd,nhd->bsn", a, b))


def test_rows_of_two_axes() -> None:
    """As sequences times a weight have them. No descriptor loads rows of one tile that two axes number."""
    nest = Products(random.randint(30, 50), 64, 128, 3)
    nest.write("out", nest.product(nest.read("a", "bmk"), nest.read("b", "kn")), "bmn")
    assert any("fuse(b m, rows)" in str(p) and p.descriptors for p in placements(nest, 8))
    compare(nest, lambda a, b: a @ b, count=8)


def test_factors_of_float8() -> None:
    """Both factors go into tensor cores as they are; scales multiply the results."""
    nest = Products(*draw(), dtype=torch.float8_e4m3fn)
    y = nest.product(nest.read("a", "mk"), nest.read("b", "nk"))
    y = nest.mul(nest.mul(y, nest.read("c", "m", torch.float32)), nest.read("d", "n", torch.float32))
    nest.write("out", y, "mn", torch.bfloat16)

    def f(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        wide = torch.float64 if c.dtype is torch.float64 else torch.float32
        y = (a.to(wide) @ b.to(wide).T) * c[:, None] * d
        return y if wide is torch.float64 else y.to(torch.bfloat16)

    compare(nest, f)


EPILOGUES: dict[str, tuple[Callable[[Products, Value], Value], Callable[[Tensor], Tensor]]] = {
    "nothing": (lambda nest, y: y, lambda y: y),
    "gelu": (gelu, F.gelu),
    "silu": (silu, F.silu),
    "relu": (lambda nest, y: nest.op("relu.default", y), F.relu),
    "scale": (lambda nest, y: nest.op("mul.Scalar", y, 0.125), lambda y: y * 0.125),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("draw_number", range(40))
def test_random_products(draw_number: int) -> None:
    """Every combination of layout, batch, dtype, a scale in front and a function behind is some draw's."""
    epilogue, layouts, dtype = random.choice([*EPILOGUES]), random.choice(LAYOUTS), random.choice(HALVES)
    batch, scaled, placed = random.choice([1, 1, 2]), random.random() < 0.4, random.choice([40, 300])
    nest = Products(*draw(placed, 40, random.choice([16, 60, 600])), batch, dtype)
    left, right = (nest.read(name, nest.batch + layout) for name, layout in zip("ab", layouts, strict=True))
    if scaled:
        right = nest.rounded(nest.mul(right, nest.read("s", "n")))
    behind, of_torch = EPILOGUES[epilogue]
    nest.write("out", behind(nest, nest.product(left, right)), f"{nest.batch}mn")

    def f(a: Tensor, b: Tensor, s: Tensor | None = None) -> Tensor:
        a, b = order(a, layouts[0], "mk"), order(b, layouts[1], "kn")
        return of_torch(a @ (b if s is None else (b * s)))

    compare(nest, f, count=3, wide=0.3)


def test_what_tensor_cores_do_not_multiply() -> None:
    """A factor in float32, as the nest has it or computes it, is refused with a reason; so are few terms."""
    refused = (torch.float32, 64, "more than 16 bits"), (torch.bfloat16, 8, "16 terms or more")
    for dtype, terms, reason in refused:
        nest = Products(100, 100, terms, dtype=dtype)
        nest.write("out", nest.product(nest.read("a", "mk"), nest.read("b", "kn")), "mn")
        with pytest.raises(LookupError, match=reason):
            cheapest(Roofline(Analysis(nest.nest()), H200, nest.buffers))
    nest = Products(100, 100, 64)
    scaled = nest.mul(nest.read("a", "mk"), nest.read("s", "k"))
    nest.write("out", nest.product(scaled, nest.read("b", "kn")), "mn")
    with pytest.raises(LookupError, match="more than 16 bits"):
        cheapest(Roofline(Analysis(nest.nest()), H200, nest.buffers))


def test_offsets_past_two_to_the_31() -> None:
    """Every number that a stride multiplies has 64 bits."""
    nest = Products(300, 100_000, 70_000)
    nest.write("out", nest.product(nest.read("a", "mk"), nest.read("b", "kn")), "mn")
    best = [p for p in schedules(nest.nest(), H200) if not p.descriptors]
    source = nest.program(best[0]).kernels[0].source
    numbers = [line for line in source.splitlines() if "tl.arange" in line or "program_id" in line]
    assert len(numbers) > 4 and all(".to(tl.int64)" in line for line in numbers), source


GROUPED = (
    "split(k, 32); split(m, 32); split(m.o, 8); split(n, 32); place(m.o.o, GRID); place(n.o, GRID); "
    "place(m.o.i, GRID); place(k.o, LOOP); place(m.i, LANES); place(n.i, LANES); place(k.i, LANES); "
    "unit(v3, TENSOR_CORE); 4 warps, 3 stages"
)


@pytest.mark.parametrize(("batch", "rows"), [(1, 9 * 32), (2, 9 * 32), (2, 10 * 32 + 3)])
def test_a_last_group_with_fewer_blocks(batch: int, rows: int) -> None:
    """No program makes blocks that are not there, in any batch."""
    nest = Products(rows, 64, 70, batch)
    y = nest.product(nest.read("a", f"{nest.batch}mk"), nest.read("b", f"{nest.batch}kn"))
    nest.write("out", y, f"{nest.batch}mn")
    placement = Placement.parse(GROUPED if batch == 1 else f"place(b, GRID); {GROUPED}")
    assert verifier.refusal(nest.nest(), placement) is None
    assert nest.program(placement).kernels[0].grid == (batch * -(-rows // 32) * 2,)
    inputs = nest.inputs()
    exact = inputs["a"].double() @ inputs["b"].double()
    eager = distance(inputs["a"] @ inputs["b"], exact)
    assert distance(nest.run(placement, inputs)["out"], exact) <= eager + 1e-6


def test_a_sum_over_rows_in_groups() -> None:
    """A group with fewer blocks would leave parts of the sum unwritten."""
    nest = Products(9 * 32, 64, 70, inner="mk")
    y = nest.product(nest.read("a", "mk"), nest.read("b", "kn"))
    nest.write("out", y, "mn")
    nest.write("bias", nest.summed(y, "m"), "n", torch.float32)
    refused = verifier.refusal(nest.nest(), Placement.parse(GROUPED))
    assert "the last group has fewer" in str(refused)
    placement = Placement.parse(GROUPED.replace("split(m.o, 8)", "split(m.o, 3)"))
    assert verifier.refusal(nest.nest(), placement) is None
    inputs = nest.inputs()
    exact = (inputs["a"].double() @ inputs["b"].double()).sum(0)
    eager = distance((inputs["a"] @ inputs["b"]).sum(0, dtype=torch.float32), exact)
    assert distance(nest.run(placement, inputs)["bias"], exact) <= eager


def of(layout_a: str, layout_b: str, batch: int = 1) -> Products:
    nest = Products(4096 // batch, 4096, 4096, batch)
    b = nest.batch
    nest.write("out", nest.product(nest.read("a", b + layout_a), nest.read("b", b + layout_b)), f"{b}mn")
    return nest


def with_gelu() -> Products:
    nest = Products(4096, 4096, 4096)
    y = nest.add(nest.product(nest.read("a", "mk"), nest.read("b", "nk")), nest.read("c", "n"))
    nest.write("out", gelu(nest, y), "mn")
    return nest


def swiglu() -> Products:
    nest = Products(4096, 4096, 4096)
    a = nest.read("a", "mk")
    gate, up = (nest.product(a, nest.read(name, "nk")) for name in ("b", "c"))
    nest.write("out", nest.mul(silu(nest, gate), up), "mn")
    return nest


def of_float8() -> Products:
    nest = Products(4096, 4096, 4096, dtype=torch.float8_e4m3fn)
    y = nest.product(nest.read("a", "mk"), nest.read("b", "nk"))
    nest.write("out", nest.mul(y, nest.read("c", "m", torch.float32)), "mn", torch.bfloat16)
    return nest


LARGE: dict[str, Callable[[], Products]] = {
    "NN": lambda: of("mk", "kn"),
    "NT": lambda: of("mk", "nk"),
    "TN": lambda: of("km", "kn"),
    "TT": lambda: of("km", "nk"),
    "batch": lambda: of("mk", "kn", 4),
    "gelu": with_gelu,
    "swiglu": swiglu,
    "float8": of_float8,
}


NO_FLOAT8 = "sm_80", "float8"  # Triton has no such type there
# Bytes of a thread that lie in memory for a while: two sums of 64 registers, beside 255 registers.
SPILLED = {("sm_80", "swiglu"): 128}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("target", "case"), [(t, case) for t in ("sm_90", "sm_80") for case in LARGE if (t, case) != NO_FLOAT8]
)
def test_machine_code(target: str, case: str) -> None:
    """The two best placements keep their sums in registers and copy the next blocks while they multiply."""
    nest, device = LARGE[case](), {"sm_90": H200, "sm_80": A100}[target]
    for placement in with_exact_products(nest.nest(), schedules(nest.nest(), device), nest.dtypes)[:2]:
        (kernel,) = nest.program(placement).kernels
        binary = compile_for(kernel, target)
        ptx = binary.asm["ptx"]
        copies = "cp.async.bulk.tensor" if placement.descriptors else "cp.async.cg"
        assert binary.spills <= SPILLED.get((target, case), 0), (binary.spills, binary.registers)
        assert 2 * 128 * 64 <= binary.shared_bytes <= device.shared_bytes - 1024
        assert case != "float8" or ".f32.e4m3.e4m3" in ptx
        assert ("wgmma.mma_async" if target == "sm_90" else "mma.sync") in ptx
        assert ptx.count(copies) >= placement.num_stages, "no block is copied ahead"


def test_predicted_times() -> None:
    """No more of the units' rate is predicted than a library reaches, and not much less for a large
    product."""
    nest = of("mk", "nk")
    roofline = Roofline(Analysis(nest.nest()), H200, nest.buffers)
    times = [roofline.us(roofline.run(p)) for p in schedules(nest.nest(), H200, nest.buffers)]
    library = 1e6 * 2 * 4096**3 / (GEMM_SHARE * H200.tensor_flops)
    assert library <= times[0] <= 1.15 * library and times == sorted(times)
    small = of("mk", "nk", 4096 // 64)
    assert cheapest(Roofline(Analysis(small.nest()), H200, small.buffers)).us >= times[0]


def test_terms_whose_number_is_known_at_run_time() -> None:
    terms = sympy.Symbol("s0", integer=True, positive=True)
    nest = Products(140, 70, terms)
    nest.described("a", "mk", nest.dtype)
    left = nest.push(Load("a", Index(0, ((0, terms), (2, 1))), None, torch.float32))
    nest.write("out", nest.product(left, nest.read("b", "kn")), "mn")
    for size in (40, 333):
        inputs = nest.inputs({terms: size})
        exact = inputs["a"].double() @ inputs["b"].double()
        for placement in placements(nest):
            ours = nest.run(placement, inputs, [size])["out"]
            assert distance(ours, exact) <= distance(inputs["a"] @ inputs["b"], exact) + 1e-6


def test_an_epilogue_that_loads_ahead_of_its_predecessor() -> None:
    """In a launch that depends on another one, a kernel loads what no kernel writes before it waits."""
    nest = Products(*draw())
    y = nest.add(nest.product(nest.read("a", "mk"), nest.read("b", "nk")), nest.read("c", "n"))
    nest.write("out", y, "mn")
    inputs, loops = nest.inputs(), (nest.nest(),)
    exact = inputs["a"].double() @ inputs["b"].double().T + inputs["c"].double()
    eager = distance(F.linear(inputs["a"], inputs["b"], inputs["c"]), exact)
    programs = emit(loops, "linear", "", nest.memory(), H200, constants=frozenset({"b", "c"}))
    assert any("wait_for_kernels" in program.kernels[0].source for program in programs)
    for program in programs:
        (ours,) = interpret(program, [inputs[buffer.name] for buffer in program.inputs], [])
        assert distance(ours, exact) <= eager + 1e-6, program.schedule
