"""Choose between a library's product with a kernel behind it, and one kernel of both.

The pass `products` is the last one over a plan: it takes a plan whose products with many rows are library
calls, and returns one in which clusters hold those products that are faster so. The times come from whoever
calls it: `compiler.products` measures both ways on the device, and keeps what it measured on disk; without a
device they are predictions. A plan that is read from disk holds the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.decision import Decision, Outcome, apart
from fusion_compiler.ir.graph_pass import Level, Pass
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cluster
from fusion_compiler.ops.products import factors_of
from fusion_compiler.passes.fuse.cluster import assembled, cluster_name, cluster_of, clusters_of, parts_of
from fusion_compiler.passes.fuse.products import RULE, Option, options_of, taken_groups
from fusion_compiler.passes.fuse.search import Search

# Devices on which `python -m benchmarks products` has measured clusters with products, with date and commit.
# With products="auto" the pass runs on these alone.
MEASURED: dict[str, str] = {}
GAIN = 0.02  # of the time of both, by which one kernel must be faster: noise is less


@dataclass(frozen=True)
class Ways:
    """The two ways of one option: the library's `calls` and then the cluster `reader`, or the clusters
    `fused`, in the order in which they run."""

    calls: tuple[str, ...]
    reader: Cluster
    fused: tuple[Cluster, ...]
    predicted: Times


@dataclass(frozen=True)
class Times:
    """The microseconds of both ways: `us` of the clusters with the products; `calls_us` of the library's
    products and `reader_us` of the kernel behind them.

    device: the name of the device on which they were measured; "" if they are predictions.
    forced: True if the products are taken in whatever the times say. failed: why nothing could be measured on
    a device that is there.
    """

    us: float
    calls_us: float
    reader_us: float
    device: str = ""
    forced: bool = False
    failed: str = ""

    @property
    def saved(self) -> float:
        return self.calls_us + self.reader_us - self.us

    @property
    def pays(self) -> bool:
        faster = self.us < (1 - GAIN) * (self.calls_us + self.reader_us)
        return self.forced or (faster and not self.failed)

    def __str__(self) -> str:
        source = f"measured on {self.device}" if self.device else "predicted"
        return f"{self.us:.0f} us against {self.calls_us:.0f} + {self.reader_us:.0f} us ({source})"


Choose = Callable[[OpDag, Sequence[Ways]], Sequence[Times]]


def predicted(dag: OpDag, ways: Sequence[Ways]) -> Sequence[Times]:
    """Return the predicted times."""
    return [way.predicted for way in ways]


def with_products(plan: FusionPlan, choose: Choose = predicted) -> FusionPlan:
    """Return a new plan with products in clusters where that is faster, and what was decided about each.

    choose: returns the times of both ways of each option. Raises ValueError for a plan without its search.
    """
    if plan.solved is None or plan.setting is None:
        raise ValueError(f"plan {plan.name} does not hold its search")
    search, groups = plan.solved
    options, refusals = options_of(search, groups)
    if not options and not refusals:
        return plan
    readers = {n: c for c, numbers in zip(plan.clusters, groups, strict=True) for n in numbers}
    ways = [_ways(search, option, readers[option.reader]) for option in options]
    times = dict(zip(options, choose(plan.dag, ways), strict=True))
    chosen = [option for option in options if times[option].pays]
    groups = taken_groups(search, groups, chosen)
    clusters = clusters_of(search, groups)
    names = {n: c.name for c, numbers in zip(clusters, groups, strict=True) for n in numbers}
    decisions = [d for option in options for d in _decided(search, option, times[option], names)]
    taken = {option.reader: option.number(search) for option in chosen}
    for refusal in refusals:
        for number in {refusal.reader, taken.get(refusal.reader, refusal.reader)} & names.keys():
            if refusal.call in search.pool.read_by(search.candidates[number]):
                decisions.append(apart(refusal.call, names[number], refusal.rule, refusal.reason))
    return assembled(
        plan.name,
        plan.dag,
        (search, groups),
        plan.setting,
        backward=plan.phase == "backward",
        products=tuple(decisions),
    )


def _decided(search: Search, option: Option, times: Times, names: Mapping[int, str]) -> list[Decision]:
    """Return the decision about an option. names: the plan's clusters' names, by candidate."""
    if times.pays:
        outcome = Outcome.FORCED if times.forced else Outcome.DONE
        rest = " and another of the rest" if option.rest is not None else ""
        reason = f"{_described(search, option)} as one kernel{rest}: {times}"
        return [Decision(RULE, names[option.number(search)], outcome, reason, times.saved)]
    kernels = "one kernel takes" if option.rest is None else "two kernels take"
    compared = "faster" if times.saved <= 0 else "as fast"
    reason = f"the library's product and a kernel are {compared}: {kernels} {times}"
    reason = f"nothing was measured: {times.failed}" if times.failed else reason
    reader = names[option.reader]
    return [apart(call, reader, RULE, reason, times.saved, tensors=(call,)) for call in option.calls]


def _ways(search: Search, option: Option, reader: Cluster) -> Ways:
    parts = [option.fused, *((option.rest,) if option.rest is not None else ())]
    named = [(cluster_name(search.dag, p.ops, search.held(p.ops)), p) for p in parts]
    clusters = tuple(cluster_of(name, p.ops, None, [p], search.pool) for name, p in named)
    return Ways(option.calls, reader, clusters, Times(option.us, option.calls_us, option.reader_us))


def _described(search: Search, option: Option) -> str:
    """Return "product with bias + gelu", or "two products with silu + mul"."""
    dag, behind = search.dag, tuple(n for n in option.fused.ops if n not in option.calls)
    bias = [] if all(_added(dag, call) is None for call in option.calls) else ["bias"]
    names = [*bias, *(parts_of(dag, behind, search.held(behind)) if behind else ())]
    products = "product" if len(option.calls) == 1 else f"{len(option.calls)} products"
    return f"{products} with {' + '.join(names)}" if names else products


def _added(dag: OpDag, name: str) -> object:
    factors = factors_of(dag.op(name).target)
    return factors.added if factors is not None else None


PRODUCTS = Pass(
    RULE,
    with_products,
    does="Put matrix products with many rows into one kernel with the element-wise ops behind them.",
    when="both ways were measured on the device, and one kernel is faster; on a device without measurements "
    'only with products="measured"',
    rounds_as_eager=False,
    level=Level.PLAN,
)
