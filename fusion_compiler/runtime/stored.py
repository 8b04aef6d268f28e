"""List and remove what is kept on disk: the store's records, and what this compiler has left in PyTorch's and
Triton's caches.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from fusion_compiler.runtime.builds import checksum, is_entry
from fusion_compiler.support.store import GRAPH, KERNEL, KINDS, PLAN, Kind, Store, read_plain, read_record

BINARIES = (".cubin", ".hsaco")
GRAPH_FOLDER = re.compile(r"a[0-9a-f]{64}")  # PyTorch's prefix and a digest of ours: its own are shorter


@dataclass(frozen=True)
class Entry:
    """One record of a `Store`, one graph of autograd's cache, or one compiled kernel.

    sort: the name of its kind. device: the GPU's name, or the target that it is compiled for; "" if it
    depends on none. versions: of torch and Triton ("" if unknown). age: seconds since its last use; for a
    kernel or a graph, since it was written. problem: "" if the entry can be read. path: a file, or a kernel's
    folder.
    """

    sort: str
    name: str
    device: str
    versions: str
    age: float
    bytes: int
    problem: str
    path: Path


def folder_of(kind: Kind, store: Store) -> Path | None:
    """Return where the entries of a kind lie, or None if that is a cache of what is not installed."""
    try:
        if kind is GRAPH:
            from torch._inductor.runtime.cache_dir_utils import default_cache_dir

            return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()) / "aotautograd"
        if kind is KERNEL:
            from triton import knobs

            return Path(knobs.cache.dir)
    except ImportError:
        return None
    return store.folder(kind)


def entries_of(kind: Kind, store: Store) -> list[Entry]:
    """Return the entries of a kind by name, without other programs'. Those that are not whole come last."""
    folder = folder_of(kind, store)
    if kind.cache == "ours":
        entries = (_record(kind, file) for file in store.files(kind))
    elif kind is GRAPH:
        entries = (_graph(file) for file in (folder.glob("*/*") if folder is not None else ()))
    else:
        entries = (_kernel(seal) for seal in (folder.glob("*/*.sha256") if folder is not None else ()))
    return sorted(itertools.chain(*entries), key=lambda e: (bool(e.problem), e.name, e.age))


def _record(kind: Kind, file: Path) -> Iterator[Entry]:
    with contextlib.suppress(OSError):  # it is being removed
        stat = file.stat()
        record: dict[str, Any] = read_record(file) or {}
        about, value = record.get("about", {}), record.get("value")
        name = str(value.get("cluster", "a graph")) if isinstance(value, dict) else file.stem[:12]
        problem = "" if record else "not a whole record"
        problem = _problem_of_plan(value) if record and kind is PLAN else problem
        shown = about.get("device", ""), about.get("versions", "")
        yield Entry(kind.name, name, *shown, time.time() - stat.st_mtime, stat.st_size, problem, file)


def _problem_of_plan(value: Any) -> str:
    """Return why the record of a plan is not one, or ""."""
    from fusion_compiler.ir.record import read

    try:
        read(value)
    except AttributeError:  # an operator of a library that this process has not imported
        return ""
    except (KeyError, TypeError, ValueError):
        return "not a plan"
    return ""


def _graph(file: Path) -> Iterator[Entry]:
    """Yield a file if its folder has a key of the store's as its name, and is no link to another folder."""
    with contextlib.suppress(OSError):  # it is being removed
        stat, folder = file.lstat(), file.parent
        if GRAPH_FOLDER.fullmatch(folder.name) and S_ISREG(stat.st_mode) and not folder.is_symlink():
            age = time.time() - stat.st_mtime
            yield Entry(GRAPH.name, folder.name[:12], "", "", age, stat.st_size, "", file)


def _kernel(seal: Path) -> Iterator[Entry]:
    """Yield a kernel that this compiler built: its folder is named as Triton names them, with a checksum."""
    folder, metadata = seal.parent, seal.with_suffix(".json")
    if not is_entry(folder):
        return
    with contextlib.suppress(OSError):  # it is being removed
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
        yield Entry(KERNEL.name, seal.stem, device, versions, age, size, problem, folder)


def clear(entries: Iterable[Entry], store: Store) -> tuple[int, int]:
    """Remove entries, and what killed writers left in the store. Return how many are gone, and the bytes."""
    gone = freed = 0
    for entry in entries:
        with contextlib.suppress(OSError):
            _remove(entry)
            gone, freed = gone + 1, freed + entry.bytes
    for kind in KINDS:
        store.remove_unfinished(kind, age=0.0)
    return gone, freed


def _remove(entry: Entry) -> None:
    """Remove the files of one entry, and their folder if that is in another cache and holds no more."""
    files, folder = [entry.path], entry.path.parent
    if entry.sort == KERNEL.name:
        names, folder = (f"{entry.name}.", f"__grp__{entry.name}."), entry.path
        files = [file for file in folder.iterdir() if file.name.startswith(names)]
    for file in files:
        file.unlink()
    if entry.sort in (GRAPH.name, KERNEL.name):
        with contextlib.suppress(OSError):
            folder.rmdir()
