"""Kernels that start while the one before them ends: what stands before their wait, and which they are."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import fusion_compiler as fc
from fusion_compiler.codegen.passes import launched_dependently
from fusion_compiler.codegen.tile import Assign, Do, For, If, Range, Statement, Store, Update
from fusion_compiler.compiler import runners
from fusion_compiler.compiler.runners import emit_cluster
from fusion_compiler.errors import InvalidOptionError
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.kernel import Kernel, Program, Role
from fusion_compiler.ir.plan_data import Cluster
from fusion_compiler.ops.syntax import Name, fm, tl
from fusion_compiler.passes.fuse import candidates
from fusion_compiler.passes.fuse.dependent import NOTE
from fusion_compiler.runtime.builds import compile_build
from fusion_compiler.runtime.target import build_of, compile_for, parse_target
from fusion_compiler.stitch.order import ordered
from tests.exactness import not_as_close, wide
from tests.fake_gpu import FakeGpu, use
from tests.kernel_text import parsed

WAIT = "fm.wait_for_kernels()"
WIDTH, PLACES = 256, 16


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Products of matrices that are too small to be worth a cluster are clusters."""
    monkeypatch.setattr(candidates, "LIBRARY_MARGIN", float("inf"))
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()


class Layer(nn.Module):
    """The parts of decoding: a norm, products of one row, a residual, and a cache that is written."""

    cache: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.register_buffer("cache", torch.randn(PLACES, width))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.cache.index_copy_(0, at, x)
        return x + self.down(F.silu(self.up(self.norm(x)))) + self.cache.mean(0)


class Decoder(nn.Module):
    def __init__(self, layers: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, at)
        return x


def token() -> tuple[Tensor, Tensor]:
    return torch.randn(1, WIDTH), torch.tensor([3])


def planned(model: Any, *inputs: Tensor, device: str = "h200", **options: Any) -> fc.FusionPlan:
    """The one plan of an inference."""
    fast = fc.compile(model, backend="eager", device=device, **options)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fast(*inputs)
    (plan,) = fast.plan
    return plan


def clusters_of(plan: fc.FusionPlan) -> list[Cluster]:
    """In the order in which they run."""
    named = {cluster.name: cluster for cluster in plan.clusters}
    return [named[step.name] for step in ordered(plan).steps if step.name in named]


def programs_of(plan: fc.FusionPlan, cluster: Cluster, limit: int = 4) -> tuple[Program, ...]:
    return emit_cluster(canonical(cluster, plan.dag), cluster, plan.dag, device_spec("h200"), limit)


def constant_pointers(plan: fc.FusionPlan, cluster: Cluster, program: Program, kernel: Kernel) -> set[str]:
    """The parameters of a kernel through which constants are read."""
    constants = canonical(cluster, plan.dag).constants or frozenset()
    inputs = [a for a in kernel.arguments if a.role is Role.INPUT]
    return {a.name for a in inputs if program.inputs[a.position].name in constants}


def functions_of(kernel: Kernel) -> list[list[str]]:
    """The lines of each function of a kernel, headers and docstrings left out."""
    parts = kernel.source.split("@triton.jit\n")[1:]
    return [re.sub(r'""".*?"""', "", part, flags=re.DOTALL).splitlines()[1:] for part in parts]


def pointers_in(lines: Sequence[str]) -> set[str]:
    return set(re.findall(r"\b\w+_ptr\b", "\n".join(lines)))


def accesses(kernel: Kernel, target: str) -> Iterator[tuple[str, set[str]]]:
    """In order, the loads, stores and waits of the PTX, with the pointers that addresses are made of."""
    origins: dict[str, set[str]] = {}
    for line in compile_for(kernel, target).asm["ptx"].splitlines():
        text = re.sub(r"^\s*@!?%p\d+\s+", "", line).strip()
        op, registers = text.split(maxsplit=1)[0] if text else "", re.findall(r"%\w+", text)
        if op.startswith("griddepcontrol"):
            yield op.rstrip(";"), set()
        elif op.startswith("ld.param"):
            number = int(re.findall(r"_param_(\d+)", text)[0])
            names = [kernel.arguments[number].name] if number < len(kernel.arguments) else []
            origins |= {register: set(names) for register in registers}
        elif op.startswith(("ld.global", "st.global", "atom.global", "red.global")):
            place = re.findall(r"\[([^\]]*)\]", text)[0]
            yield op[:9], {p for register in re.findall(r"%\w+", place) for p in origins.get(register, set())}
            origins |= {r: set() for r in re.findall(r"%\w+", text.split("[")[0])}
        elif registers:
            origins[registers[0]] = {p for register in registers[1:] for p in origins.get(register, set())}


def test_every_kernel_but_the_first_waits_before_all_but_constants() -> None:
    plan = planned(Decoder(), *token())
    first, *others = clusters_of(plan)
    assert len(others) >= 5 and first.constants is None
    assert not any(WAIT in k.source or k.dependent for p in programs_of(plan, first) for k in p.kernels)
    loaded: set[str] = set()
    for cluster in others:
        assert cluster.constants is not None
        for program in programs_of(plan, cluster, limit=1000):
            for kernel in program.kernels:
                plain = kernel.together > 1
                assert kernel.dependent is not plain and (WAIT in kernel.source) is not plain
                constant = constant_pointers(plan, cluster, program, kernel)
                for lines in () if plain else functions_of(kernel):
                    where = [i for i, line in enumerate(lines) if line == f"    {WAIT}"]
                    calls = [line for line in lines if re.match(rf"\s+{kernel.name}_\d+\(", line)]
                    assert len(where) == (0 if calls else 1), kernel.source
                    before = lines[: where[0]] if where else []
                    assert pointers_in(before) <= constant, kernel.source
                    assert not any("store" in line or line.strip().startswith("for ") for line in before)
                    loaded |= {cluster.name} if pointers_in(before) else set()
    assert len(loaded) >= 4, "weights of both products of both layers"


def test_the_wait_stands_there_in_ptx() -> None:
    plan = planned(Decoder(), *token())
    early: set[str] = set()
    for cluster in clusters_of(plan):
        for program in programs_of(plan, cluster)[:2]:
            for kernel in program.kernels:
                order = list(accesses(kernel, "sm_90"))
                kinds = [kind for kind, _ in order]
                assert "st.global" in kinds and "ld.global" in kinds
                if not kernel.dependent:
                    assert not any("griddepcontrol" in kind for kind in kinds)
                    continue
                waits = [i for i, kind in enumerate(kinds) if kind == "griddepcontrol.wait"]
                starts = [i for i, kind in enumerate(kinds) if kind == "griddepcontrol.launch_dependents"]
                assert len(waits) == len(starts) == 1 and starts[0] < waits[0] < kinds.index("st.global")
                before = [pointers for kind, pointers in order[: waits[0]] if "global" in kind]
                constant = constant_pointers(plan, cluster, program, kernel)
                assert all(pointers and pointers <= constant for pointers in before), kernel.source
                assert all(pointers for kind, pointers in order if "global" in kind), "each address is told"
                early |= {cluster.name} if before else set()
                for target in ("sm_80", "gfx942"):
                    asm = compile_for(kernel, target).asm
                    assert not any("griddepcontrol" in text for text in asm.values())
                assert "griddepcontrol.wait" in compile_for(kernel, "sm_100").asm["ptx"]
    assert len(early) >= 3


def test_values_and_the_cache_are_eagers() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch._dynamo.reset()
        model = Decoder().to(dtype)
        eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
        fast = fc.compile(model, backend="interpret", strict=True, dynamic=False)
        with torch.no_grad():
            for place in (3, 0, 3):
                x, at = torch.randn(1, WIDTH, dtype=dtype), torch.tensor([place])
                ours, theirs, truth = fast(x, at), eager(x, at), exact(wide(x), at)
                assert not_as_close(ours, theirs, truth) is None
        for ours, theirs, truth in zip(model.buffers(), eager.buffers(), exact.buffers(), strict=True):
            assert not_as_close(ours, theirs, truth) is None
        assert "6 of 7 kernels" in fast.plan[0].notes[NOTE]


# -- constants ----------------------------------------------------------------------------------------


class Changing(nn.Module):
    """The second product's matrix is written by the graph in some way, the first one's is not."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(2, WIDTH, WIDTH)).unbind(0)
        self.first, self.second = nn.Parameter(self.first), nn.Parameter(self.second)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "before":
            self.second.add_(1)
        x = F.linear(torch.softmax(x, -1), self.first)
        x = F.linear(torch.softmax(x, -1), self.second)
        if self.change == "after":
            self.second.add_(1)
        if self.change == "row":
            self.second[3].zero_()
        return torch.softmax(x, -1)


@pytest.mark.parametrize(("change", "count"), [("", 2), ("before", 1), ("after", 1), ("row", 1)])
def test_what_the_graph_writes_is_no_constant(change: str, count: int) -> None:
    model = Changing(change).requires_grad_(False)
    plan = planned(model, torch.randn(1, WIDTH))
    constants = {name for cluster in plan.clusters for name in cluster.constants or ()}
    read = {
        name for c in clusters_of(plan)[1:] for name in c.inputs if plan.dag.op(name).outputs[0].shape[0] > 1
    }
    assert len(constants) <= count and constants <= read
    if not change:
        assert constants
    for name in constants:
        users = {str(plan.dag.op(user).target) for user in plan.dag.consumers(name)}
        assert not any("copy_" in user or "put_" in user for user in users), users


def test_inputs_are_no_constants() -> None:
    def f(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.softmax(F.linear(torch.softmax(F.linear(x, a), -1), b), -1)

    plan = planned(f, torch.randn(1, WIDTH), *torch.randn(2, WIDTH, WIDTH))
    assert [cluster.constants for cluster in clusters_of(plan)][1:] == [()] * (len(plan.clusters) - 1)


def test_clusters_of_other_constants_are_other_kernels() -> None:
    class Both(nn.Module):
        cache: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.register_buffer("cache", torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            self.cache.mul_(0.5)
            for matrix in (self.weight, self.cache, self.weight, self.cache, self.weight):
                x = F.linear(torch.softmax(x, -1), matrix)
            return torch.softmax(x, -1)

    plan = planned(Both().requires_grad_(False), torch.randn(1, WIDTH))
    keys = [canonical(cluster, plan.dag) for cluster in clusters_of(plan)]
    alike: dict[object, set[object]] = {}
    for key in keys:
        alike.setdefault(replace(key, constants=None), set()).add(key.constants)
    assert max(map(len, alike.values())) > 1, str(plan)
    assert len(set(keys)) < len(keys), "the product with the weight is one kernel in both places"


# -- which kernels ------------------------------------------------------------------------------------


def note(model: Any, *inputs: Tensor, **options: Any) -> str | None:
    plan = planned(model, *inputs, **options)
    decided = plan.notes.get(NOTE)
    assert (decided or "").startswith("done") == any(c.constants is not None for c in plan.clusters)
    return decided


def test_a_plan_says_what_was_decided() -> None:
    model = Decoder()
    assert "done: 6 of 7 kernels" in str(planned(model, *token()))
    assert note(model, *token(), dependent_launch=False) == "refused: dependent_launch=False"
    decision = note(model, *token(), device="a100")
    assert decision == "refused: a100 has none (sm_80; NVIDIA has it from sm_90 on)"
    assert (note(model, *token(), device="mi300x") or "").startswith("refused: mi300x has none")
    assert (note(model, *token(), device="b200") or "").startswith("done")
    assert note(lambda x: torch.softmax(x, -1), token()[0]) is None, "there is no kernel before another"


def softmax_twice(x: Tensor) -> Tensor:
    return torch.softmax(torch.softmax(x, -1).cumsum(0), 0)


def test_long_kernels_take_part_where_that_is_asked_for() -> None:
    x = torch.empty(1 << 14, 4096, device="meta")
    assert "not bound by launches" in (note(softmax_twice, x) or "")
    assert (note(softmax_twice, x, dependent_launch=True) or "").startswith("done")


@pytest.mark.parametrize("wanted", ["auto", True])
def test_training_takes_no_part(wanted: bool | str) -> None:
    fast = fc.compile(Decoder(1), backend="eager", device="h200", dependent_launch=wanted)
    fast(*token()).sum().backward()
    assert len(fast.plan) == 2
    for plan in fast.plan:
        assert all(cluster.constants is None for cluster in plan.clusters)
        decision = plan.notes.get(NOTE)
        assert decision is None if wanted == "auto" else "the graph is trained" in decision


def test_a_kernel_behind_a_call_is_launched_plainly() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x = torch.softmax(torch.softmax(x, -1).cumsum(0), 0)
        return torch.softmax(torch.softmax(torch.sort(x).values + y, -1).cumsum(0), 0)

    plan = planned(f, torch.randn(64, 64), torch.randn(64, 64))
    clusters = {cluster.name: cluster for cluster in plan.clusters}
    steps = [step.name for step in ordered(plan).steps]
    assert len(steps) > len(clusters) > 2
    for before, name in zip([None, *steps], steps, strict=False):
        if name in clusters:
            assert (clusters[name].constants is None) == (before not in clusters)


def test_a_kernel_behind_one_that_may_not_be_launched_is_launched_plainly() -> None:
    """A kernel whose grid may be empty."""

    def f(x: Tensor) -> Tensor:
        return torch.softmax(torch.softmax(x[5:], -1).cumsum(0), 0)

    fast = fc.compile(f, backend="eager", device="h200", dynamic=True)
    fast(torch.randn(64, 32))
    (plan,) = fast.plan
    assert len(plan.clusters) > 1 and all(cluster.constants is None for cluster in plan.clusters)


def test_kernels_of_any_size_but_none_start_early() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.softmax(torch.softmax(x, -1).cumsum(0), 0)

    fast = fc.compile(f, backend="eager", device="h200", dynamic=True)
    fast(torch.randn(64, 32))
    (plan,) = fast.plan
    first, *others = plan.clusters
    assert first.constants is None and others and all(c.constants is not None for c in others)


def test_programs_that_wait_for_each_other_take_no_part() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x, -1), y.amax(-1).mean()

    plan = planned(f, torch.empty(16, 262144, device="meta"), torch.empty(2048, 4096, device="meta"))
    kinds: set[str] = set()
    for cluster in plan.clusters:
        for program in programs_of(plan, replace(cluster, constants=()), limit=1000):
            together, counts = program.kernels[0].together > 1, any(b.zeroed for b in program.scratch)
            kinds |= {"together" if together else "counts" if counts else "other"}
            for kernel in program.kernels:
                assert kernel.dependent is (WAIT in kernel.source) is not together
                if kernel.dependent and counts:  # an earlier kernel may use them until then
                    (lines,) = [f for f in functions_of(kernel) if f"    {WAIT}" in f]
                    assert "ticket_ptr" not in "".join(lines[: lines.index(f"    {WAIT}")])
    assert kinds == {"together", "counts", "other"}


def test_launched_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled for a dependent launch only if the target has it."""
    gpu = FakeGpu()
    use(gpu, monkeypatch)
    model = Decoder()
    exact = copy.deepcopy(model)
    fast = fc.compile(model, device="h200", tune=False, strict=True, cudagraphs=False)
    x, at = token()
    with torch.no_grad():
        torch.testing.assert_close(fast(x, at), exact(x, at), rtol=1e-4, atol=1e-4)
    dependent = {build.name: build.dependent for build in gpu.loaded}
    assert [dependent[name] for name, _, _ in gpu.launched] == [False, *[True] * (len(gpu.launched) - 1)]
    build = next(build for build in gpu.loaded if build.dependent)
    assert compile_build(build).metadata.launch_pdl
    assert not compile_build(replace(build, target=("cuda", 80, 32))).metadata.launch_pdl
    compile_build(replace(build, target=("hip", "gfx942", 64)))


def test_decided_again_from_disk() -> None:
    model, first = Decoder(), token()
    plans: list[fc.FusionPlan] = []
    for _ in range(2):
        torch._dynamo.reset()
        fast = fc.compile(copy.deepcopy(model), backend="interpret", strict=True)
        with torch.no_grad():
            fast(*first)
        plans += fast.plan
    assert "planned from disk" in plans[1].notes["seconds"]
    assert [c.constants for c in plans[0].clusters] == [c.constants for c in plans[1].clusters]
    assert plans[0].notes[NOTE] == plans[1].notes[NOTE]


def test_the_option_is_checked() -> None:
    with pytest.raises(InvalidOptionError, match="dependent_launch"):
        fc.compile(torch.sin, dependent_launch="always")


def test_a_kernel_says_so_to_the_compiler() -> None:
    plan = planned(Decoder(1), *token())
    kernel = programs_of(plan, clusters_of(plan)[1])[0].kernels[0]
    build = build_of(kernel, parse_target("sm_90"))
    assert build.dependent and not build_of(replace(kernel, dependent=False), parse_target("sm_90")).dependent


# -- the pass -----------------------------------------------------------------------------------------

POINTERS = frozenset(map(Name, ("x_ptr", "w_ptr", "out_ptr")))


def moved(*body: Statement, turns: int = 0) -> list[Statement]:
    return launched_dependently([*body], frozenset({Name("w_ptr")}), POINTERS, turns)


def let(name: str, text: str) -> Assign:
    return Assign((Name(name),), parsed(text))


def counted(start: str, end: str, step: int, body: list[Statement], stages: int | None = None) -> For:
    return For(Name("start"), Range(parsed(start), parsed(end), step, stages), body)


COL, X = let("col", "tl.arange(0, 8)"), let("x", "tl.load(x_ptr + col)")
W, END = let("w", "tl.load(w_ptr + col)"), Store(parsed("out_ptr + col"), parsed("x * w"))
HERE = Do(fm.wait_for_kernels())


def test_constants_move_before_the_wait_with_what_says_where_they_are() -> None:
    at = let("at", "col + 8")
    far = let("w", "tl.load(w_ptr + at, mask=at < 12)")
    assert moved(COL, X, W, END) == [COL, W, HERE, X, END]
    assert moved(COL, X, at, far, END) == [COL, at, far, HERE, X, END]
    assert moved(X, END) == [HERE, X, END]


@pytest.mark.parametrize(
    "between",
    [
        [let("w", "tl.load(w_ptr + x)")],  # where is data
        [let("w", "tl.load(w_ptr + col, mask=x > 0)")],
        [let("i", "tl.load(w_ptr)"), let("w", "tl.load(w_ptr + i + x)")][1:],
        [let("w", "0"), W],  # another value before
        [W, Update(Name("w"), "+", parsed("1"))],
        [counted("0", "16", 8, [W])],
        [let("w", "fm.load_behind(w_ptr, x)")],
        [let("w", "fm.both(w_ptr, x_ptr)")],
    ],
    ids=str,
)
def test_what_stays_behind_the_wait(between: list[Statement]) -> None:
    assert moved(COL, X, *between, END) == [COL, HERE, X, *between, END]


def test_a_loop_of_one_turn_is_none() -> None:
    at, within = let("start", "0"), let("col", "start + tl.arange(0, 8)")
    loop = counted("0", "8", 8, stages=2, body=[within, X, W])
    assert moved(loop, END) == [at, within, W, HERE, X, END]


def test_a_loop_of_one_turn_stays_before_a_narrower_one() -> None:
    """Triton wants a variable of a loop to have one shape."""
    within = let("col", "start + tl.arange(0, 8)")
    narrow = let("col", "8 + tl.arange(0, 4)")
    body = counted("0", "8", 8, [within, X]), counted("8", "12", 4, [narrow, X])
    assert moved(*body, END) == [HERE, *body, END]


WITHIN = let("col", "start + tl.arange(0, 8)")
SUM = Update(Name("total"), "+", parsed("x * w"))


def test_first_turns_of_a_loop_are_taken_out_of_it() -> None:
    """Their weights are loaded early; the rest of the loop, and what it adds to, are as they were."""
    loop = counted("0", "40", 8, stages=3, body=[WITHIN, X, W, SUM])
    body = moved(loop, END, turns=2)
    wait = body.index(HERE)
    early, late, rest = body[:wait], body[wait + 1 : -2], body[-2]
    early = [s for s in early if isinstance(s, Assign)]
    assert [str(s.value) for s in early[::2]] == ["0 + tl.arange(0, 8)", "8 + tl.arange(0, 8)"]
    names = [s.targets[0] for s in early]
    assert len({*names}) == 4 and not {Name("col"), Name("w")} & {*names}, "each has a name of its own"
    weights = [s.targets[0] for s in early[1::2]]
    assert [s.value for s in early[1::2]] == [tl.load(Name("w_ptr") + name) for name in names[::2]]
    x = [s.targets[0] for s in late if isinstance(s, Assign)]
    sums = [s for s in late if isinstance(s, Update)]
    assert sums == [Update(SUM.target, "+", x[i] * weights[i]) for i in range(2)]
    assert rest == counted("16", "40", 8, stages=3, body=loop.body) and body[-1] == END


def test_a_loop_of_which_no_turn_is_left_is_none() -> None:
    body = moved(counted("0", "16", 8, [WITHIN, X, W, SUM]), END, turns=4)
    assert not any(isinstance(s, For) for s in body)
    assert let("x", "tl.load(x_ptr + col)") in body, "the last turn's values are read behind it"
    assert body.index(let("w", "tl.load(w_ptr + col)")) < body.index(HERE)


def test_what_a_turn_leaves_to_the_next_keeps_its_name() -> None:
    """The largest so far, say: it is read before it is assigned."""
    largest = let("most", "tl.maximum(most, x * w)")
    body = moved(counted("0", "32", 8, [WITHIN, X, W, largest]), END, turns=1)
    (first,) = (s for s in body if isinstance(s, Assign) and s.targets == (Name("most"),))
    assert str(first.value) == "tl.maximum(most, x * w)"


@pytest.mark.parametrize(
    "loop",
    [
        counted("0", "32", 8, [WITHIN, X]),  # of no constants
        counted("first", "32", 8, [WITHIN, W]),
        counted("0", "size", 8, [WITHIN, W]),
        counted("0", "32", 8, [WITHIN, W, If(parsed("w > 0"), [END])]),
    ],
    ids=str,
)
def test_loops_that_stay_as_they_are(loop: For) -> None:
    assert moved(loop, END, turns=2) == [HERE, loop, END]


class Transposed(nn.Linear):
    """Whose matrix is stored with the sum along its columns."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight.view(self.in_features, -1))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("rows", "layer"), [(1, nn.Linear), (5, nn.Linear), (1, Transposed)])
def test_what_is_loaded_early_changes_no_value(
    rows: int, layer: type[nn.Linear], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Run every program that loads weights early in the interpreter."""
    sizes = (16, 600, 24, 1100, 8) if layer is nn.Linear else (16, 2100, 40)
    model = nn.Sequential(*(nn.Sequential(layer(a, b), nn.SiLU()) for a, b in pairwise(sizes)))
    dtype = torch.float32 if rows == 1 else torch.bfloat16  # tensor cores multiply more rows
    model, x = model.to(dtype), torch.randn(rows, 16, dtype=dtype)
    exact = copy.deepcopy(model).double()
    number, most, texts = 0, 1, set[str]()

    def one(*arguments: Any) -> tuple[Program, ...]:
        nonlocal most
        programs = emit(*arguments)
        early = [program for program in programs if "early" in program.schedule]
        most = max(most, len(early))
        texts.update(kernel.source for program in early for kernel in program.kernels)
        return (early[number % len(early)],) if early else programs

    emit = runners.emit
    monkeypatch.setattr(runners, "emit", one)
    while number < most:
        monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / str(number)))  # plans keep kernels
        torch._dynamo.reset()
        fast = fc.compile(model, backend="interpret", device="h200", strict=True, dynamic=False)
        with torch.no_grad():
            assert not_as_close(fast(x), model(x), exact(wide(x))) is None
        number += 1
    least = (5, 6) if rows == 1 else (4, 5)
    assert (number >= least[0] and len(texts) >= least[1]) if layer is nn.Linear else texts
    assert all(WAIT in text for text in texts)


def test_rows_of_one_and_a_half_blocks_compile() -> None:
    def products(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, a)), b)

    tensors = torch.randn(2, 64), torch.randn(768, 64), torch.randn(8192, 768)
    plan = planned(products, *(t.bfloat16() for t in tensors), dependent_launch=True)
    programs = programs_of(plan, clusters_of(plan)[-1])
    assert any("split(col, 512)" in program.schedule for program in programs)
    for program in programs:
        assert compile_for(program.kernels[0], "sm_90").spills == 0
