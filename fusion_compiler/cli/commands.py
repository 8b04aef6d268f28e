"""The command line: parsing and printing. The modules that the commands import do the work.

torch is imported where it is needed, so that --help is quick and `doctor` works without it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fusion_compiler import __version__
from fusion_compiler.errors import (
    FusionError,
    OutputError,
    TargetError,
    UnknownOpError,
    UnsupportedDeviceError,
    describe,
)
from fusion_compiler.runtime.loading import brief, load, user_line

if TYPE_CHECKING:
    from fusion_compiler.runtime.stored import Entry

DONE, FAILED, USAGE = 0, 1, 2
PROGRAM = "fusion-compiler"

EXIT_CODES = """exit codes:
  0  done
  1  it failed: the model, the compilation, a check of doctor
  2  used wrongly: an unknown option, device or op, a FILE:callable or an output file that cannot be used"""

TARGET = """FILE:callable names a function without arguments that returns (model, args) or
(model, args, kwargs), where model(*args, **kwargs) is the call to look at:

  # model.py
  def example():
      return MyModel(), (torch.randn(8, 128, 512),)

FILE is a path (model.py:example) or a module (package.module:example)."""

EXAMPLES = {
    "": """examples:
  fusion-compiler explain model.py:example            what would be fused, and why the rest is not
  fusion-compiler profile model.py:example            what each kernel takes, beside the prediction
  fusion-compiler cache                               what is kept on disk
  fusion-compiler doctor                              does this machine have all that is needed?""",
    "passes": """examples:
  fusion-compiler passes
  fusion-compiler passes --json - | jq '.[].name'""",
    "explain": """examples:
  fusion-compiler explain model.py:example
  fusion-compiler explain model.py:example --device a100 --html plan.html
  fusion-compiler explain model.py:example --why add_4 layer_norm_2
  fusion-compiler explain model.py:example --json - | jq '.totals'
  fusion-compiler explain package.model:example --dot plan.dot --graphml plan.graphml

Nothing is run and no GPU is needed: plans are made from shapes alone, for the device that is named.""",
    "profile": """examples:
  fusion-compiler profile model.py:example
  fusion-compiler profile model.py:example --inference --repetitions 50
  fusion-compiler profile model.py:example --trace step.json --json step-times.json
  fusion-compiler profile model.py:example --backend interpret

The function puts the model where it is to run (.cuda()). On a CPU the host's times are shown, to try things
out. A trace opens in https://ui.perfetto.dev.""",
    "cache": """examples:
  fusion-compiler cache
  fusion-compiler cache list --json -
  fusion-compiler cache clear --dry-run
  fusion-compiler cache clear --also pytorch triton

The store is FUSION_CACHE_DIR (~/.cache/fusion_compiler). PyTorch's cache (TORCHINDUCTOR_CACHE_DIR) and
Triton's (TRITON_CACHE_DIR, ~/.triton/cache) have entries of this compiler too. `clear` leaves them alone
unless --also names the cache, and never touches those of other programs. All entries are made again when they
are needed.""",
    "doctor": """examples:
  fusion-compiler doctor
  fusion-compiler doctor --json -

Each check is ok, a warning (it works, but not as well as it could) or a failure; the last compiles a kernel
and compares it with eager.""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. arguments: the words after the program's name."""
    try:
        chosen = parser().parse_args(arguments)
    except SystemExit as stop:  # argparse has printed help, or what was wrong
        return int(stop.code or 0)
    command: Callable[[argparse.Namespace], int] = chosen.command
    try:
        check_outputs(chosen)  # before the work, which may take long
        code = command(chosen)
        sys.stdout.flush()
        return code
    except (OutputError, TargetError, UnknownOpError, UnsupportedDeviceError) as error:
        return _complain(error, USAGE)
    except BrokenPipeError:  # the reader (head, less) has enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return DONE
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _complain(error, FAILED)


def check_outputs(chosen: argparse.Namespace) -> None:
    """Raise OutputError for an output file of the command line that cannot be written."""
    for option in ("json", "html", "dot", "graphml", "trace"):
        path = getattr(chosen, option, None)
        if path in (None, "-"):
            continue
        file = Path(path)
        if not file.parent.is_dir():
            raise OutputError(path=path, detail=f"there is no folder {file.parent}")
        if file.is_dir():
            raise OutputError(path=path, detail="it is a folder")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise OutputError(path=path, detail="permission denied")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; each command's function is its `command`."""
    top = _described(argparse.ArgumentParser(PROGRAM), "Explain, profile and look after compiled models.", "")
    top.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, what: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        sub = _described(commands.add_parser(name, help=what), f"{what[0].upper()}{what[1:]}.", name)
        sub.set_defaults(command=run)
        return sub

    explaining = add("explain", "what would be fused and why, without running anything", explain)
    profiling = add("profile", "run it, and show what each kernel takes beside its prediction", profile)
    for each in (explaining, profiling):
        each.add_argument("target", metavar="FILE:callable", help="a function that gives model and arguments")
        each.add_argument("--inference", action="store_true", help="without a backward pass")
        each.add_argument("--json", metavar="PATH", help="the report as data; - is stdout, and nothing else")
    explaining.add_argument("--device", default="h200", help="the device to plan for (default: %(default)s)")
    explaining.add_argument("--html", metavar="PATH", help="a page that opens offline")
    explaining.add_argument("--dot", metavar="PATH", help="the graph for Graphviz; - is stdout")
    explaining.add_argument("--graphml", metavar="PATH", help="the graph for other programs")
    explaining.add_argument("--why", nargs=2, metavar=("A", "B"), help="why two ops or clusters are not one")
    profiling.add_argument("--device", help="the device to predict for (default: the one that it runs on)")
    profiling.add_argument("--repetitions", type=_positive, default=10, help="default: %(default)s")
    profiling.add_argument("--trace", metavar="PATH", help="the last step for Perfetto, with cluster names")
    profiling.add_argument("--html", metavar="PATH", help="a page of the plan with what was measured")
    profiling.add_argument("--backend", choices=("auto", "interpret", "eager"), default="auto")

    caching = add("cache", "what is kept on disk: its size, each entry, or remove it", cache)
    caching.add_argument("action", choices=("size", "list", "clear"), nargs="?", default="size")
    caching.add_argument("--dry-run", action="store_true", help="with clear: say what it would remove")
    also = "with clear: remove this compiler's entries from these caches too"
    caching.add_argument("--also", nargs="+", choices=("pytorch", "triton"), default=[], help=also)
    listing = add("passes", "the passes over a graph in order, for compile(..., disable=(name,))", passes)
    diagnosing = add("doctor", "check versions, device, toolchain, caches, and a kernel", doctor)
    for each in (caching, listing, diagnosing):
        each.add_argument("--json", metavar="PATH", help="as data; - is stdout, and nothing else")
    return top


def _described(command: argparse.ArgumentParser, what: str, name: str) -> argparse.ArgumentParser:
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.description = f"{what}\n\n{TARGET}" if name in ("explain", "profile") else what
    command.epilog = f"{EXAMPLES[name]}\n\n{EXIT_CODES}"
    return command


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


# -- commands ----------------------------------------------------------------------------------------


def explain(chosen: argparse.Namespace) -> int:
    """Print the report of a model, or the one answer or format that the options select."""
    import torch

    import fusion_compiler as fc
    from fusion_compiler.ir.device import device_spec

    device_spec(chosen.device)
    example = load(chosen.target)
    with torch.no_grad() if chosen.inference else contextlib.nullcontext():
        report = fc.explain(example.model, *example.args, device=chosen.device, **example.kwargs)
    if chosen.why:
        print(*report.why(*chosen.why), sep="\n\n")  # one answer for each graph that has both
    elif "-" not in (chosen.json, chosen.dot):
        report.show()
    if chosen.html:
        report.html(chosen.html)
    if chosen.graphml:
        report.graphml(chosen.graphml)
    if chosen.dot:
        _write(chosen.dot, report.dot())
    if chosen.json:
        _write(chosen.json, _data(report.json()))
    return DONE


def profile(chosen: argparse.Namespace) -> int:
    """Compile, run and measure a model."""
    import torch

    import fusion_compiler as fc
    from fusion_compiler.ir.device import device_spec
    from fusion_compiler.report.explanation import quiet_fakes

    if chosen.device is not None:
        device_spec(chosen.device)
    example = load(chosen.target)
    fast = fc.compile(example.model, backend=chosen.backend, device=chosen.device)
    with quiet_fakes(), torch.no_grad() if chosen.inference else contextlib.nullcontext():
        result = fc.profile(fast, *example.args, repetitions=chosen.repetitions, **example.kwargs)
    if chosen.json != "-":
        print(result)
    if chosen.trace:
        result.trace(chosen.trace)
    if chosen.html:
        result.report().html(chosen.html)
    if chosen.json:
        _write(chosen.json, _data(result.json()))
    return DONE


def cache(chosen: argparse.Namespace) -> int:
    """Sum up, list or clear the entries on disk."""
    from fusion_compiler.runtime import stored
    from fusion_compiler.support.store import KINDS, Store

    store, caches = Store(), ("ours", *(chosen.also if chosen.action == "clear" else ("pytorch", "triton")))
    by_kind = {kind: stored.entries_of(kind, store) for kind in KINDS if kind.cache in caches}
    entries = [entry for each in by_kind.values() for entry in each]
    sums: dict[str, dict[str, Any]] = {}
    for kind, each in by_kind.items():
        total = {"entries": len(each), "bytes": sum(entry.bytes for entry in each)}
        path = str(stored.folder_of(kind, store) or "")
        sums[kind.name] = {**total, "path": path, "holds": kind.holds}
    rows = [(f"{n}:", f"{d['entries']} entries", _size(d["bytes"]), d["path"]) for n, d in sums.items()]
    lines, data = _table(rows, right=(1, 2)).splitlines(), cast(Any, sums)
    if chosen.action == "size":
        lines = [f"{line}\n  {d['holds']}" for line, d in zip(lines, sums.values(), strict=True)]
    elif chosen.action == "clear":
        lines.insert(0, "would remove" if chosen.dry_run else "removed")
        count, freed = len(entries), sum(entry.bytes for entry in entries)
        count, freed = (count, freed) if chosen.dry_run else stored.clear(entries, store)
        data = {"removed": count, "bytes": freed, "folders": [d["path"] for d in sums.values()]}
        data["dry_run"] = chosen.dry_run
    else:
        data = [{**vars(entry), "path": str(entry.path)} for entry in entries]
        head = ("sort", "kernel", "device", "versions", "used", "size", "")
        lines = [_table([head, *map(_row, entries)], right=(4, 5)) if entries else "nothing is kept"]
    if chosen.json:
        _write(chosen.json, _data(data))
    if chosen.json != "-":
        print("\n".join(lines))
    return DONE


def passes(chosen: argparse.Namespace) -> int:
    """Print the passes in the order in which they run."""
    from fusion_compiler.pipeline import PASSES

    fields = ("name", "level", "does", "when", "gains", "rounds_as_eager")
    if chosen.json:
        _write(chosen.json, _data([{field: getattr(each, field) for field in fields} for each in PASSES]))
    if chosen.json != "-":
        for each in PASSES:
            lines = [f"{each.name}  ({each.level})", f"  {each.does}", f"  when: {each.when}"]
            lines += [f"  gains: {each.gains}"] if each.gains else []
            lines += [] if each.rounds_as_eager else ['  left out with numerics="eager"']
            print(*lines, sep="\n")
    return DONE


def doctor(chosen: argparse.Namespace) -> int:
    """Print each check as it is done; return FAILED if one failed."""
    from fusion_compiler.cli.doctor import FAIL, checks

    results: list[dict[str, str]] = []
    for check in checks():
        results.append(dict(vars(check)))
        if chosen.json != "-":
            print(f"{check.status:<5} {check.name:<13} {check.text}", flush=True)
            if check.todo:
                print(f"{'':<19} what to do: {check.todo}", flush=True)
    if chosen.json:
        _write(chosen.json, _data(results))
    return FAILED if any(check["status"] == FAIL for check in results) else DONE


# -- printing ----------------------------------------------------------------------------------------


def _complain(error: Exception, code: int) -> int:
    """Print what went wrong and where in the user's code; FUSION_DEBUG adds the traceback."""
    if os.environ.get("FUSION_DEBUG", "").strip().lower() not in ("", "0", "false", "no", "off"):
        traceback.print_exception(error)
    lines = str(error).splitlines() if isinstance(error, FusionError) else [brief(error)]
    if getattr(error, "where", None) is None and code == FAILED:
        with contextlib.suppress(ImportError):  # torch may be missing
            where = user_line(error)
            lines[1:1] = [] if where is None else [f"  at {describe(where)}"]
    if not isinstance(error, FusionError | OSError):
        lines.append("  what to do: FUSION_DEBUG=1 shows the whole traceback")
    print(f"{PROGRAM}: {lines[0]}", *lines[1:], sep="\n", file=sys.stderr)
    return code


def _write(path: str, text: str) -> None:
    if path == "-":
        print(text)
    else:
        Path(path).write_text(f"{text}\n", encoding="utf-8")


def _data(data: Any) -> str:
    return json.dumps(data, indent=1)


def _row(entry: Entry) -> tuple[str, ...]:
    return (
        entry.sort,
        entry.name,
        entry.device,
        entry.versions,
        _age(entry.age),
        _size(entry.bytes),
        entry.problem,
    )


def _age(seconds: float) -> str:
    """Return an age as text, such as "3 h ago"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 10**6 else f"{size / 1e3:.1f} KB"


def _table(rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    """Return rows as text in columns of equal width; the columns in `right` are aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
