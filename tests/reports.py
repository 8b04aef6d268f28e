"""Reports by docs/report-schema.md, made up: as large as wanted, and with texts that try to be markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
HOSTILE = (
    '</script><script>window.broken = 1</script><img src=x onerror="window.broken=1">&amp;{{script}}<!--'
)
KERNEL = """@triton.jit
def {name}(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    # row sums of {name}
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * columns + cols, cols < columns, 0.0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(x / 2.0, 0))
"""
CLASS_OF = {
    "mean": "normalization",
    "mm": "contraction",
    "rand": "random",
    "sort": "opaque",
}  # else element-wise


@dataclass(frozen=True)
class Part:
    """One unit of every layer. reads: earlier parts, "before" (the last layer's result), "seed"."""

    name: str
    sort: str
    module: str  # below the layer
    ops: str
    reads: str

    @property
    def group(self) -> str:
        classes = [CLASS_OF.get(op, "element-wise") for op in self.ops.split()]
        return "normalization" if "normalization" in classes else classes[0]


LAYER = (
    Part("norm", "cluster", "norm1", "_to_copy mean rsqrt mul _to_copy", "before"),
    Part("query", "library", "attention.query", "mm", "norm"),
    Part("key", "library", "attention.key", "mm", "norm"),
    Part("value", "library", "attention.value", "mm", "norm"),
    Part("rotate", "cluster", "attention", "mul mul add mul mul add", "query key"),
    Part("attend", "library", "attention", "mm", "rotate value"),
    Part("output", "library", "attention.output", "mm", "attend"),
    Part("dropout_add_norm", "cluster", "", "rand mul add mean rsqrt mul _to_copy", "output before seed"),
    Part("up", "library", "mlp.up", "mm", "dropout_add_norm"),
    Part("gelu", "cluster", "mlp.act", "_to_copy mul erf add mul _to_copy", "up"),
    Part("down", "library", "mlp.down", "mm", "gelu"),
    Part("sort", "eager", "mlp", "sort", "down"),
    Part("add", "cluster", "", "_to_copy add _to_copy", "sort dropout_add_norm"),
)
OPS_OF_A_LAYER = sum(len(part.ops.split()) + 1 for part in LAYER)  # and a view before each unit


def report_of(ops: int = 60, *, measured: bool = False, hostile: bool = False) -> Json:
    """A forward and a backward graph of at least `ops` ops each, in layers of OPS_OF_A_LAYER.

    measured: as after fc.profile. hostile: names, source lines and reasons hold HOSTILE.
    """
    layers = -(-ops // OPS_OF_A_LAYER)
    tail = HOSTILE if hostile else ""
    graphs = [_graph(phase, layers, measured, tail) for phase in ("forward", "backward")]
    kernels = {unit["kernel"] for graph in graphs for unit in graph["units"] if unit["kernel"]}
    edges = [{**edge, "graph": graph["name"]} for graph in graphs for edge in graph["edges"]]
    step = {
        "device": "h200",
        "repetitions": 20,
        "clock": "device",
        "step_us": 900.0,
        "work_us": 880.0,
        "outside_us": 12.0,
        "unmatched": [{"kernel": "fill", "calls": 3, "us": 12.0}],
    }
    return {
        "schema": 2,
        "versions": {"fusion_compiler": "0.1.0", "torch": "2.13.0", "triton": None},
        "model": f"Encoder{tail}",
        "device": "h200",
        "captured_by": "torch.fx",
        "not_whole": "",
        "incomplete": "",
        "assumed": "",
        "breaks": [],
        "totals": _added(graph["totals"] for graph in graphs),
        "movement": {"classes": _movement(graphs)},
        "graphs": graphs,
        "missed": [
            {**edge, "times": 1, "total_us": edge["saving_us"], "others": 0}
            for edge in sorted(edges, key=lambda edge: -edge["saving_us"])[:10]
        ],
        "kernels": {name: KERNEL.format(name=name) for name in sorted(kernels)},
        "measured": step if measured else None,
    }


def _graph(phase: str, layers: int, measured: bool, tail: str) -> Json:
    graph: Json = {
        "name": f"graph0.{phase}",
        "phase": phase,
        "ops": [_op("seed", "seed", "seed", [], None)],
        "units": [_unit(Part("seed", "eager", "", "rand", ""), "seed", ["seed"], [], "", measured, tail)],
        "edges": [],
        "decisions": [
            {"rule": "masks", "subject": "", "outcome": "noted", "reason": "none found", "us": None}
        ],
        "notes": {"masks": "none found"},
    }
    before = "x"  # an input of the graph: no op makes it
    for layer in range(layers):
        results = {"before": before, "seed": "seed"}
        for part in LAYER:
            results[part.name] = _add_part(graph, part, layer, results, measured, tail)
        before = results["add"]
    graph["calls"] = [_call(op) for op in graph["ops"] if op["unit"] is not None]
    return {**graph, "totals": _totals(graph)}


def _add_part(graph: Json, part: Part, layer: int, results: Json, measured: bool, tail: str) -> str:
    """Adds a unit with its ops, a view before it, and its edges; returns the op that it stores."""
    unit = f"{part.name}_{layer}{tail}"
    module = f"model.layers.{layer}.{part.module}".removesuffix(".")
    code = f"{part.name} = f(x){tail}"
    source = {"module": module, "file": f"/home/me/{part.name}.py", "line": 10 + len(unit), "code": code}
    first, *others = part.reads.split()
    view = f"view_of_{unit}"
    graph["ops"].append(_op(view, "view", None, [results[first]], source))
    inputs = [view, *(results[read] for read in others)]
    names = [f"{unit}_{target}_{i}" for i, target in enumerate(part.ops.split())]
    for i, target in enumerate(part.ops.split()):
        graph["ops"].append(_op(names[i], target, unit, inputs if i == 0 else [names[i - 1]], source))
    graph["units"].append(_unit(part, unit, names, inputs, module, measured, tail))
    for read in (first, *others):
        if read not in ("before", "seed"):
            graph["edges"].append(_edge(f"{read}_{layer}{tail}", unit, results[read], layer))
    return names[-1]


def _op(name: str, target: str, unit: str | None, inputs: list[str], source: Json | None) -> Json:
    kind = "layout" if unit is None else CLASS_OF.get(target, "element-wise")
    return {
        "name": name,
        "target": f"aten.{target}.default",
        "kind": kind,
        "class": kind,
        "unit": unit,
        "inputs": inputs,
        "shapes": ["f16[8, 512, 1024]"],
        "source": source,
    }


def _call(op: Json) -> Json:
    """Return the call that eager runs for an op that is no view."""
    contraction = op["class"] == "contraction"
    same = {key: op[key] for key in ("name", "class", "unit", "source")}
    return {
        **same,
        "target": op["target"].split(".")[1],
        "ops": [op["name"]],
        "gflop": 8.6 if contraction else 0.004,
        "input_mwords": 8.4,
        "output_mwords": 4.2,
        "bytes": 25_165_824,
        "intensity": 1.5,
        "us": 12.5 if contraction else 6.3,
        "bound": "memory",
        "share": 0.01,
        "mue": 0.6,
    }


def _unit(
    part: Part, name: str, ops: list[str], inputs: list[str], module: str, measured: bool, tail: str
) -> Json:
    cluster = part.sort == "cluster"
    us = 4.0 + len(ops) if cluster else 12.5
    return {
        "name": name,
        "sort": part.sort,
        "class": part.group,
        "ops": ops,
        "inputs": inputs,
        "outputs": ops[-1:],
        "module": module,
        "space": "4096 rows x 1024" if cluster else "",
        "pattern": "norm" if cluster and part.group == "normalization" else None,
        "kernel": f"{part.name}_kernel" if cluster else None,
        "us": us,
        "eager_us": 6.3 * len(ops) if cluster else us,
        "bytes_read": 16_777_216,
        "bytes_written": 8_388_608,
        "flops": 4_194_304,
        "bound": "memory" if cluster else "arithmetic",
        "why": f"Memory bounds it.{tail}" if cluster else f"{part.sort}: it is called as it is.{tail}",
        "measured": {"us": us * 1.1, "bandwidth": 3.1e12, "error": -1 / 11} if measured else None,
    }


def _edge(a: str, b: str, tensor: str, layer: int) -> Json:
    """Into "query", "up" and "down" by the rule of contractions, which gives bounds; else by cost."""
    bound = b.startswith(("query", "up", "down"))
    return {
        "a": a,
        "b": b,
        "tensors": [tensor],
        "bytes": 8_388_608,
        "rule": "contraction" if bound else "cost",
        "reason": f"one kernel of {a} and {b} needs 312 registers",
        "saving_us": 3.5 - layer / 10 if bound else 1.25 - len(b) / 10,
        "at_most": bound,
    }


def _totals(graph: Json) -> Json:
    ops, units, calls = graph["ops"], graph["units"], graph["calls"]
    clusters = [unit for unit in units if unit["sort"] == "cluster"]
    return {
        "ops": len(ops),
        "fused_ops": sum(len(unit["ops"]) for unit in clusters),
        "kernels": len(clusters),
        "distinct_kernels": len({unit["kernel"] for unit in clusters}),
        "library_calls": sum(unit["sort"] == "library" for unit in units),
        "eager_ops": sum(unit["sort"] == "eager" for unit in units),
        "launches_before": len(calls),
        "launches_after": len(units),
        "bytes_before": sum(call["bytes"] for call in calls),
        "bytes_after": sum(unit["bytes_read"] + unit["bytes_written"] for unit in units),
        "intermediates": sum(len(unit["ops"]) - 1 for unit in clusters),
        "us_before": sum(call["us"] for call in calls),
        "us_after": sum(unit["us"] for unit in units),
    }


def _added(totals: Iterable[Json]) -> Json:
    rows = list(totals)
    return {key: sum(row[key] for row in rows) for key in rows[0]}


def _movement(graphs: Sequence[Json]) -> list[Json]:
    calls = [call for graph in graphs for call in graph["calls"]]
    units = [unit for graph in graphs for unit in graph["units"]]
    gflop, us = (sum(call[key] for call in calls) for key in ("gflop", "us"))
    rows: list[Json] = []
    for name in sorted({call["class"] for call in calls}):
        before = [call for call in calls if call["class"] == name]
        after = [unit for unit in units if unit["class"] == name]
        row: Json = {"class": name, "calls": len(before), "units": len(after)}
        row |= {key: sum(call[key] for call in before) for key in ("gflop", "input_mwords", "output_mwords")}
        row["flop_share"] = row["gflop"] / gflop
        row["bytes_before"] = sum(call["bytes"] for call in before)
        row["bytes_after"] = sum(unit["bytes_read"] + unit["bytes_written"] for unit in after)
        row["us_before"] = sum(call["us"] for call in before)
        row["us_after"] = sum(unit["us"] for unit in after)
        row["share"] = row["us_before"] / us
        rows.append({**row, "mue_before": 0.55, "mue_after": 0.7})
    return rows
