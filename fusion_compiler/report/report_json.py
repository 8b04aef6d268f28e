"""A report as plain data: docs/report-schema.md in code."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from fusion_compiler.ir import plan_text
from fusion_compiler.ir.dag import Op, TensorMeta
from fusion_compiler.ir.decision import Decision
from fusion_compiler.ir.device import DeviceSpec, device_spec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Call, Cost
from fusion_compiler.ops.table import Kind
from fusion_compiler.passes.fuse.movement import CLASSES, class_of
from fusion_compiler.passes.fuse.why import Unit, Why
from fusion_compiler.report.page import SCHEMA
from fusion_compiler.report.report_data import ReportData

Row = dict[str, Any]
TOTALS = (
    "ops", "fused_ops", "kernels", "distinct_kernels", "library_calls", "eager_ops", "launches_before",
    "launches_after", "bytes_before", "bytes_after", "intermediates", "us_before", "us_after",
)  # fmt: skip


SAID = ("model", "device", "captured_by", "not_whole", "incomplete", "assumed")


def report_json(report: ReportData) -> Row:
    """Return a report as plain data; see docs/report-schema.md."""
    kernels = dict(report.kernels.values())
    measured = report.measured or {}
    return {
        "schema": SCHEMA,
        "versions": {name: _version(name) for name in ("fusion_compiler", "torch", "triton")},
        **{name: getattr(report, name) for name in SAID},
        "breaks": [{**vars(b), "source": plan_text.source_json(b.source)} for b in report.breaks],
        "totals": totals_of(report),
        "movement": {"classes": class_rows(report)},
        "graphs": [
            _graph(report, plan, measured.get("units", {}).get(plan.name, {})) for plan in report.plans
        ],
        "missed": [
            {"graph": m.graph, "times": m.times, "total_us": m.total_us, "others": m.others}
            | _edge(report.questions[m.graph], m.refused)
            for m in report.missed
        ],
        "kernels": kernels,
        "measured": measured.get("measured"),
    }


def totals_of(report: ReportData) -> Row:
    """Return the totals over all graphs."""
    rows = [_totals(why) for why in report.questions.values()]
    return {key: sum(row[key] for row in rows) for key in TOTALS}


def class_rows(report: ReportData) -> list[Row]:
    """Return the data-movement analysis: a row for each class with calls or units, in the paper's order."""
    device = device_spec(report.device)
    calls = [call for plan in report.plans for call in plan.calls]
    units = [(why, unit) for why in report.questions.values() for unit in why.units.values()]
    flops, us = sum(c.flops for c in calls), sum(c.cost.us for c in calls)
    rows: list[Row] = []
    for kind in dict.fromkeys(CLASSES.values()):
        before = [c for c in calls if c.kind == kind]
        after = [why.cost(u) for why, u in units if class_of(map(why.dag.op, u.ops)) == kind]
        if before or after:
            mine, mine_us = sum(c.flops for c in before), sum(c.cost.us for c in before)
            rows.append({
                "class": kind,
                "calls": len(before),
                "units": len(after),
                "gflop": mine / 1e9,
                "flop_share": mine / flops if flops else 0.0,
                "input_mwords": sum(c.words_read for c in before) / 1e6,
                "output_mwords": sum(c.words_written for c in before) / 1e6,
                "bytes_before": _moved(c.cost for c in before),
                "bytes_after": _moved(after),
                "us_before": mine_us,
                "us_after": sum(c.us for c in after),
                "share": mine_us / us if us else 0.0,
                "mue_before": _usage([c.cost for c in before], device),
                "mue_after": _usage(after, device),
            })  # fmt: skip
    return rows


def _totals(why: Why) -> Row:
    """Return the totals of one graph, over every call of eager and every unit."""
    plan, costs = why.plan, [why.cost(u) for u in why.units.values()]
    stored = {name for unit in why.units.values() for name in unit.outputs}
    counted: Row = {
        "launches_before": len(plan.calls),
        "launches_after": len(costs),
        "bytes_before": _moved(c.cost for c in plan.calls),
        "bytes_after": _moved(costs),
        "intermediates": sum(name not in stored for call in plan.calls for name in call.outputs),
        "us_before": sum(c.cost.us for c in plan.calls),
        "us_after": sum(c.us for c in costs),
    }
    return {key: (asdict(plan_text.totals(plan)) | counted)[key] for key in TOTALS}


def _graph(report: ReportData, plan: FusionPlan, measured: Row) -> Row:
    why = report.questions[plan.name]
    unit_of = {name: unit.name for unit in reversed(why.units.values()) for name in unit.ops}
    unit_of |= {name: unit.name for unit in why.units.values() for name in unit.outputs}
    ops = [plan.dag.op(name) for name in plan.dag.order if name not in plan.dag.inputs]
    us = sum(call.cost.us for call in plan.calls)
    return {
        "name": plan.name,
        "phase": plan.phase,
        "totals": _totals(why),
        "calls": [_call(call, unit_of, us, why.setting.device) for call in plan.calls],
        "ops": [_op(op, why, unit_of.get(op.name)) for op in ops],
        "units": [_unit(report, why, why.units[name], measured.get(name)) for name in why.order],
        "edges": [_edge(why, refused) for refused in report.edges[plan.name]],
        "decisions": list(map(plan_text.decision_json, plan.about_graph)),
        "notes": plan.notes,
    }


def _call(call: Call, unit_of: dict[str, str], us: float, device: DeviceSpec) -> Row:
    moved = call.cost.moved
    return {
        "name": call.name,
        "target": call.target,
        "class": call.kind,
        "ops": list(call.ops),
        "unit": unit_of.get(call.name),
        "source": plan_text.source_json(call.source),
        "gflop": call.flops / 1e9,
        "input_mwords": call.words_read / 1e6,
        "output_mwords": call.words_written / 1e6,
        "bytes": moved,
        "intensity": call.flops / moved if moved else 0.0,
        "us": call.cost.us,
        "bound": call.cost.bound,
        "share": call.cost.us / us if us else 0.0,
        "mue": _usage([call.cost], device),
    }


def _op(op: Op, why: Why, unit: str | None) -> Row:
    return {
        "name": op.name,
        "target": str(op.target),
        "kind": str(op.kind),
        "class": class_of([op]),
        "unit": unit,
        "inputs": list(op.inputs),
        "shapes": [_shape(meta, why) for meta in op.outputs],
        "source": plan_text.source_json(op.source),
    }


def _unit(report: ReportData, why: Why, unit: Unit, measured: Row | None) -> Row:
    cost, cluster = why.cost(unit), unit.cluster
    ops = [why.dag.op(name) for name in unit.ops]
    library = cluster is None and ops[0].kind is Kind.CONTRACTION
    eager = (
        sum(c.cost.us for c in why.plan.calls if set(c.outputs) & set(unit.ops)) if cluster is None else 0.0
    )
    return {
        "name": unit.name,
        "sort": "cluster" if cluster is not None else "library" if library else "eager",
        "class": class_of(ops),
        "ops": list(unit.ops),
        "inputs": list(cluster.inputs if cluster is not None else ops[0].inputs),
        "outputs": list(unit.outputs),
        "module": _module(ops),
        "space": plan_text.iteration_space(cluster) if cluster is not None else "",
        "pattern": cluster.pattern if cluster is not None else None,
        "kernel": report.kernels.get((why.plan.name, unit.name), (None,))[0],
        **asdict(cost),
        "eager_us": cluster.eager_us if cluster is not None else eager,
        "why": _bound_text(cost, why.setting.device) if cluster is not None else why.reasons[unit.name],
        "measured": measured,
    }


def _bound_text(cost: Cost, device: DeviceSpec) -> str:
    """Return a sentence on the resource that bounds a kernel."""
    moved = cost.moved
    copy = moved / device.copy_bandwidth * 1e6
    match cost.bound:
        case "memory":
            return (
                f"{plan_text.human_bytes(moved)} of traffic alone take {copy:.1f} us of its {cost.us:.1f} us"
            )
        case "arithmetic":
            return f"its arithmetic takes longer than the {copy:.1f} us of its traffic"
        case "latency":
            return f"too few programs to draw the bandwidth: its traffic alone takes {copy:.1f} us"
        case _:
            return f"shorter than two launches of {device.floor_us} us: what counts is that it is one"


def _edge(why: Why, refused: Decision) -> Row:
    return {
        "a": refused.subject,
        "b": refused.other,
        "tensors": list(refused.tensors),
        "bytes": sum(map(why.tensors.bytes, refused.tensors)),
        "rule": refused.rule,
        "reason": refused.reason,
        "saving_us": refused.saving,
        "at_most": refused.at_most,
    }


def _moved(costs: Iterable[Cost]) -> int:
    return sum(cost.moved for cost in costs)


def _usage(costs: Sequence[Cost], device: DeviceSpec) -> float:
    """Return the memory usage efficiency: the time of copying the same bytes, over the time taken."""
    us = sum(c.us for c in costs)
    return min(1.0, _moved(costs) / device.copy_bandwidth * 1e6 / us) if us else 0.0


def _module(ops: Sequence[Op]) -> str:
    """Return the innermost module that all ops come from."""
    paths = [op.source.module.split(".") for op in ops if op.source is not None and op.source.module]
    if not paths:
        return ""
    shortest = min(map(len, paths))
    same = [i for i in range(shortest) if len({tuple(path[: i + 1]) for path in paths}) == 1]
    return ".".join(paths[0][: len(same)])


def _shape(meta: TensorMeta, why: Why) -> str:
    sizes = [str(s) if isinstance(s, int) else f"{s}={hint(s, why.setting.hints)}" for s in meta.shape]
    return f"{str(meta.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return None
