"""List and remove what is kept on disk: records of several sorts, and this compiler's kernels in Triton's
cache.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_compiler.runtime.builds import checksum, is_entry
from fusion_compiler.runtime.cache import FOLDER, PLANS, REWRITES, Cache, read_plain, read_record

BINARIES = (".cubin", ".hsaco")


@dataclass(frozen=True)
class Entry:
    """An entry is one record of a `Cache`, or one compiled kernel.

    sort: "tuning", "plan", "rewrite" or "kernel". device: the GPU's name, or the target compiled for; "" of a
    rewrite. versions: of torch and Triton ("" where unknown). age: seconds since it was last used (a kernel:
    made). problem: "" where it is whole. path: a file, or a kernel's folder.
    """

    sort: str
    name: str
    device: str
    versions: str
    age: float
    bytes: int
    problem: str
    path: Path


def caches() -> dict[str, Cache]:
    """Return the records' caches, by sort."""
    folders = {"tuning": FOLDER, "plan": PLANS, "rewrite": REWRITES}
    return {sort: Cache(folder=folder) for sort, folder in folders.items()}


def record_entries(cache: Cache, sort: str = "tuning") -> list[Entry]:
    """Return the records in a cache's folder, by name. Records that are not whole come last."""
    entries: list[Entry] = []
    for file in cache.files():
        with contextlib.suppress(OSError):
            stat = file.stat()
            record = read_record(file)
            key = str(record["key"]) if record else ""
            device, _, versions = re.sub(r"^\w+ \w+( on )?", "", key).partition(", ")
            name = _name_of(record) if record else file.stem[:12]
            problem = "" if record else "not a whole record"
            age = time.time() - stat.st_mtime
            entries.append(Entry(sort, name, device, versions, age, stat.st_size, problem, file))
    return sorted(entries, key=lambda e: (bool(e.problem), e.name, e.age))


def _name_of(record: dict[str, Any]) -> str:
    value = record["value"]
    return str(value.get("cluster", "a graph")) if isinstance(value, dict) else "?"


def kernel_folder() -> Path | None:
    """Return the folder where Triton keeps kernels, those of other programs too, or None if Triton is not
    installed."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return Path(knobs.cache.dir)


def kernel_entries(folder: Path | None) -> list[Entry]:
    """Return the kernels that this compiler built: folders named as Triton names them, with its checksum
    inside."""
    seals = sorted(folder.glob("*/*.sha256")) if folder is not None else []
    seals = [seal for seal in seals if is_entry(seal.parent)]
    entries = [entry for seal in seals for entry in _kernel(seal)]
    return sorted(entries, key=lambda e: (bool(e.problem), e.name, e.age))


def _kernel(seal: Path) -> Iterator[Entry]:
    with contextlib.suppress(OSError):  # it is being removed
        folder, metadata = seal.parent, seal.with_suffix(".json")
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        age = time.time() - seal.stat().st_mtime
        device, versions, problem = "", "", ""
        try:
            fields = json.loads(read_plain(metadata))
            target = fields["target"]
            arch = target["arch"]
            device = f"sm_{arch}" if target["backend"] == "cuda" else str(arch)
            versions = f"triton {fields['triton_version']}" if "triton_version" in fields else ""
            problem = "" if checksum(seal).encode() == read_plain(seal) else "damaged"
            if not any(seal.with_suffix(binary).is_file() for binary in BINARIES):
                problem = "incomplete"
        except (OSError, ValueError, KeyError, TypeError):
            problem = "incomplete"
        yield Entry("kernel", seal.stem, device, versions, age, size, problem, folder)


def clear(entries: Iterable[Entry], caches: Iterable[Cache]) -> tuple[int, int]:
    """Remove entries, and what killed writers left. Return how many are gone, and their bytes."""
    gone = freed = 0
    for entry in entries:
        with contextlib.suppress(OSError):
            if entry.sort == "kernel":
                _remove_kernel(entry)
            else:
                entry.path.unlink()
            gone, freed = gone + 1, freed + entry.bytes
    for cache in caches:
        cache.clear()
    return gone, freed


def _remove_kernel(entry: Entry) -> None:
    """Remove the files of one kernel, and their folder if there is nothing else in it."""
    for file in entry.path.iterdir():
        if file.name.startswith((f"{entry.name}.", f"__grp__{entry.name}.")):
            file.unlink()
    with contextlib.suppress(OSError):
        entry.path.rmdir()
