"""Read the plan of a graph from disk, or plan the graph and keep the plan there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusion_compiler.compiler.products import Products
from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.decision import Decision, Decisions, Outcome, noted
from fusion_compiler.ir.graph_info import GraphInfo, Phase
from fusion_compiler.ir.kernel import Program
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Setting
from fusion_compiler.ir.record import NotWritable
from fusion_compiler.options import Options
from fusion_compiler.passes.fuse.cluster import plan as plan_clusters
from fusion_compiler.passes.fuse.one_nest import plan_one
from fusion_compiler.passes.patterns.indexed import key_of
from fusion_compiler.passes.patterns.match import match_all
from fusion_compiler.passes.patterns.notes import notes_of_hints
from fusion_compiler.passes.patterns.trace import Traced, traced_gradient, traced_hint
from fusion_compiler.patterns import DEFAULT_PATTERNS, ClusterHint, Pattern, text_of_patterns
from fusion_compiler.runtime.kept_plans import read_plan, write_plan
from fusion_compiler.runtime.stages import Stages
from fusion_compiler.support.store import PLAN, Key, Store


@dataclass(frozen=True)
class Planned:
    """The object has a plan, and says where it comes from.

    programs: the programs of its clusters, by name, if the plan comes from disk; None for a new plan.
    key: under which the plan is kept on disk, or None. decisions: why it is not kept there.
    """

    plan: FusionPlan
    programs: Mapping[str, tuple[Program, ...]] | None
    key: Key | None
    decisions: Decisions = ()


class Planner:
    """A planner plans the graphs of one compile().

    asked: True if the plans keep their searches, to answer questions.
    """

    def __init__(
        self,
        options: Options,
        patterns: Sequence[Pattern],
        store: Store,
        stages: Stages,
        products: Products,
        *,
        asked: bool,
    ) -> None:
        self.options, self.asked, self.store, self.stages = options, asked, store, stages
        self.products = products
        self.patterns = patterns
        self.user_patterns = tuple(p for p in patterns if p not in DEFAULT_PATTERNS)
        self.computed: set[str] = set()  # operators of the forward graphs

    def plan(self, info: GraphInfo, dag: OpDag, setting: Setting, backend: str) -> Planned:
        """Return the plan of a graph from disk, or a new one."""
        decisions: Decisions = ()
        try:
            key = self.key(info, dag, setting, backend)
        except NotWritable as reason:
            key, decisions = None, (noted("plan on disk", f"not kept: {reason}"),)
        kept = read_plan(self.store, key, info.name, dag, setting) if key is not None else None
        if kept is not None:
            return Planned(*kept, key)
        refusals: Decisions = ()
        if info.one_nest:
            one = plan_one(info.name, dag, setting.device, setting.hints)
            if isinstance(one, FusionPlan):
                return Planned(one, None, key, decisions)
            refusals = (Decision("one nest", info.name, Outcome.REFUSED, one),)
        self.stages.enter("match")
        is_backward = info.phase is Phase.BACKWARD
        hints = self.hints(info.phase)
        matched = match_all(hints, dag, origins=info.origins, watched=self.user_patterns)
        notes = notes_of_hints(hints, matched, self.user_patterns, backward=is_backward)
        self.stages.enter("plan")
        plan = plan_clusters(
            info.name,
            dag,
            setting.device,
            setting.hints,
            numerics=setting.numerics,
            backward=is_backward,
            matches=matched.matches,
        )
        plan = self.products.placed(plan, setting.device, backend)
        names = {pattern.name for pattern in self.user_patterns}
        refused = (d for d in plan.about_graph if d.rule in names)
        return Planned(plan.decided(*notes, *refused, *refusals), None, key, decisions)

    def keep(
        self, planned: Planned, plan: FusionPlan, programs: Mapping[str, tuple[Program, ...]]
    ) -> Decisions:
        """Put a new plan on disk, with the programs of its clusters by name; return why it is not there.

        plan: `planned.plan` with what the later stages decided.
        """
        if planned.key is None or planned.programs is not None:
            return planned.decisions
        reason = write_plan(self.store, planned.key, plan, programs)
        return (noted("plan on disk", f"not kept: {reason}"),) if reason else ()

    def key(self, info: GraphInfo, dag: OpDag, setting: Setting, backend: str) -> Key | None:
        """Return the disk-cache key of a graph's plan, or None if the plan must not be cached.

        Plans that answer questions (`asked`) need the full search. Graphs without a digest or with dynamic
        sizes have no key either. Raise NotWritable if a pattern has no stable text.
        """
        if info.phase is not Phase.BACKWARD:
            self.computed |= {key_of(dag.op(name)) for name in dag.order}
        if not info.digest or self.asked or setting.hints:
            return None
        return PLAN.key(
            device=setting.device,
            backend=backend,
            options=self.options,
            patterns=text_of_patterns(self.patterns),
            graph=info.digest,
            phase=info.phase,
            operators=[(name, str(dag.op(name).target)) for name in dag.order],
            origins=info.origins,  # which `where=` asks about
            forward_operators=sorted(self.computed),  # which gradients a backward has
        )

    def hints(self, phase: Phase) -> list[Traced]:
        """Return the cluster hints to look for in a graph.

        In a backward graph the gradient of a hint stands before it, if a forward graph had its operators.
        """
        hints: list[Traced] = []
        for pattern in self.patterns:
            if isinstance(pattern, ClusterHint):
                hint = traced_hint(pattern)
                if pattern.backward and phase is Phase.BACKWARD and hint.operators <= self.computed:
                    hints.append(traced_gradient(pattern))
                hints.append(hint)
        return hints

    def not_looked_for(self, decisions: Decisions) -> Decisions:
        """Return a note for each rule that was not looked for, if rewriting above autograd was given up."""
        if not any(d.rule == "pre-autograd" for d in decisions):
            return ()
        rules = {p.name for p in self.user_patterns if not isinstance(p, ClusterHint)}
        silent = sorted(rules.difference(d.rule for d in decisions))
        return tuple(noted(name, "not looked for: see pre-autograd") for name in silent)
