"""List and remove what is kept on disk: the store's records, and what this compiler has left in PyTorch's and
Triton's caches.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_compiler.runtime.builds import checksum, is_entry
from fusion_compiler.support.store import (
    GRAPH,
    KERNEL,
    KINDS,
    UNFINISHED,
    Kind,
    Store,
    read_plain,
    read_record,
)

BINARIES = (".cubin", ".hsaco")
GRAPH_FOLDER = re.compile(r"a[0-9a-f]{64}")  # PyTorch's prefix and a digest of ours: its own are shorter


@dataclass(frozen=True)
class Entry:
    """An entry is one record of a `Store`, one of autograd's graphs, or one compiled kernel.

    sort: the name of its kind. device: the GPU's name, or the target compiled for; "" if it depends on none.
    versions: of torch and Triton ("" where unknown). age: seconds since it was last used (a kernel or graph:
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


def folders(store: Store) -> dict[Kind, Path | None]:
    """Return the folder of each kind's entries, or None for a cache of PyTorch or Triton if that is not
    installed."""
    others = {GRAPH: graph_folder(), KERNEL: kernel_folder()}
    return {kind: others[kind] if kind in others else store.folder(kind) for kind in KINDS}


def entries_of(store: Store) -> list[Entry]:
    """Return all entries, by kind and name. Those that are not whole come last."""
    others = [*graph_entries(graph_folder()), *kernel_entries(kernel_folder())]
    return [*record_entries(store), *others]


def record_entries(store: Store) -> list[Entry]:
    """Return the records of a store, by kind and name. Records of a kind that are not whole come last."""
    return [entry for kind in KINDS if kind.cache == "ours" for entry in _ordered(_records(store, kind))]


def _ordered(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda e: (bool(e.problem), e.name, e.age))


def _records(store: Store, kind: Kind) -> Iterator[Entry]:
    for file in store.files(kind):
        with contextlib.suppress(OSError):
            stat = file.stat()
            record: dict[str, Any] = read_record(file) or {}
            about, value = record.get("about", {}), record.get("value")
            name = str(value.get("cluster", "a graph")) if isinstance(value, dict) else file.stem[:12]
            problem = "" if record else "not a whole record"
            shown = about.get("device", ""), about.get("versions", "")
            yield Entry(kind.name, name, *shown, time.time() - stat.st_mtime, stat.st_size, problem, file)


def graph_folder() -> Path | None:
    """Return the folder where PyTorch keeps autograd's graphs, those of torch.compile too, or None if it is
    not installed."""
    if (folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR")) is None:
        try:
            from torch._inductor.runtime.cache_dir_utils import default_cache_dir
        except ImportError:
            return None
        folder = default_cache_dir()
    return Path(folder) / "aotautograd"


def graph_entries(folder: Path | None) -> list[Entry]:
    """Return autograd's graphs that were kept for this compiler: digests of the store name their folders."""
    entries: list[Entry] = []
    for file in folder.glob("*/*") if folder is not None else ():
        if GRAPH_FOLDER.fullmatch(file.parent.name) and not file.parent.is_symlink():
            with contextlib.suppress(OSError):
                stat = file.lstat()
                age = time.time() - stat.st_mtime
                name = file.parent.name[:12]
                entries.append(Entry(GRAPH.name, name, "", "", age, stat.st_size, "", file))
    return _ordered(entries)


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
    return _ordered(entry for seal in seals for entry in _kernel(seal))


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
        yield Entry(KERNEL.name, seal.stem, device, versions, age, size, problem, folder)


def clear(entries: Iterable[Entry], store: Store) -> tuple[int, int]:
    """Remove entries, and what killed writers left in the store. Return how many are gone, and the bytes."""
    gone = freed = 0
    for entry in entries:
        with contextlib.suppress(OSError):
            _remove(entry)
            gone, freed = gone + 1, freed + entry.bytes
    for file in (file for kind in KINDS for file in store.files(kind, UNFINISHED)):
        with contextlib.suppress(OSError):
            file.unlink()
    return gone, freed


def _remove(entry: Entry) -> None:
    """Remove the files of one entry, and its folder if that is in another cache and holds no more."""
    if entry.sort == KERNEL.name:
        names = (f"{entry.name}.", f"__grp__{entry.name}.")
        files, folder = [f for f in entry.path.iterdir() if f.name.startswith(names)], entry.path
    else:
        files, folder = [entry.path], entry.path.parent
    for file in files:
        file.unlink()
    if entry.sort in (GRAPH.name, KERNEL.name):
        with contextlib.suppress(OSError):
            folder.rmdir()
