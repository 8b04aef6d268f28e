"""Keep small records on disk, by the hash of all that they depend on.

`KINDS` lists every sort of entry with the inputs that its keys declare, and `Kind.key` is the only function
that makes a key for the disk. A record is one file, `<digest of the key>.json`, with a checksum. It is
written under another name, flushed to the disk and moved into place, so a reader sees the whole old record,
the whole new one, or none. A file that is not a whole record (truncated, flipped bits, written by something
else) counts as absent, and the next write replaces it.

The folder that a user names may hold anything. Each kind has a folder below it, and only plain files whose
names are such a digest are ever read, replaced or removed there. A folder that belongs to another user is
left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import stat
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_compiler.errors import CacheError, FusionWarning

_log = logging.getLogger("fusion_compiler.support")
DEFAULT_BYTES = 64 * 2**20
RECORD = re.compile(r"[0-9a-f]{64}\.json")
UNFINISHED = re.compile(r"[0-9a-f]{64}\.\w+\.tmp")
# A writer that was killed leaves its unfinished file behind; younger ones may still be written.
ABANDONED_SECONDS = 3600.0
# The size is looked at once in so many writes of one process: a listing costs more than a write.
WRITES_PER_CHECK = 64


@dataclass(frozen=True)
class Key:
    """A key names one entry. about: the inputs that a listing shows."""

    kind: Kind
    digest: str
    about: dict[str, str]


@dataclass(frozen=True)
class Kind:
    """A kind is one sort of entry.

    version: it changes with the form of the entries. inputs: names of all that an entry depends on. holds: a
    sentence for listings. cache: whose cache has the entries: "ours" (a `Store`), "pytorch", or "triton",
    which makes its keys itself.
    """

    name: str
    version: int
    inputs: tuple[str, ...]
    holds: str
    cache: str = "ours"

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.version}"

    def key(self, **inputs: Any) -> Key:
        """Return the key of the entry that depends on `inputs`, and on `source` and `versions` if declared.

        An input is anything that JSON holds, or a dataclass of such values. Raise TypeError for any other
        value, and if the names are not exactly the declared ones.
        """
        computed = {"source": source_digest, "versions": versions}
        wrong = set(self.inputs).difference(computed).symmetric_difference(inputs)
        if wrong:
            raise TypeError(f"a key of kind {self.name!r} has other inputs: {', '.join(sorted(wrong))}")
        values = inputs | {name: computed[name]() for name in self.inputs if name in computed}
        text = json.dumps([self.folder, values], sort_keys=True, default=_fields)
        shown = {name: values[name] for name in ("device", "versions") if name in values}
        return Key(self, digest(text), {name: str(getattr(v, "name", v)) for name, v in shown.items()})


TUNING = Kind(
    "tuning", 2, ("versions", "device", "kernels"),
    "A tuning entry says which schedule of a kernel was fastest on a GPU, alone and within a graph.",
)  # fmt: skip
PLAN = Kind(
    "plan", 2, (
        "source", "versions", "device", "backend", "options", "patterns", "graph", "phase", "operators",
        "origins", "forward_operators",
    ),
    "A plan entry holds what was decided about one graph, and the source text of its kernels.",
)  # fmt: skip
REWRITE = Kind(
    "rewrite", 1, ("source", "versions", "options", "patterns", "state", "arguments", "graph"),
    "A rewrite entry names what autograd keeps for a graph of TorchDynamo's, with the rewrites' notes.",
)  # fmt: skip
GRAPH = Kind(
    "graph", 1, ("source", "versions", "options", "state", "arguments", "marks", "graph"),
    "A graph entry holds the forward and backward graphs that autograd made, in PyTorch's cache.", "pytorch",
)  # fmt: skip
KERNEL = Kind(
    "kernel", 1, (),
    "A kernel entry holds the machine code of a kernel of this compiler's, in Triton's cache.", "triton",
)  # fmt: skip
KINDS = (TUNING, PLAN, REWRITE, GRAPH, KERNEL)


def _fields(value: Any) -> Any:
    """Return a dataclass as what JSON holds. Raise TypeError for anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: [getattr(value, f.name) for f in dataclasses.fields(value)]}
    raise TypeError(f"a key cannot depend on a {type(value).__name__}")


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


@functools.cache
def source_digest() -> str:
    """Return a hash of this package's source and tables, and of the version of Python."""
    root = Path(__file__).parent.parent
    files = sorted((*root.rglob("*.py"), *root.rglob("*.csv")))
    parts = [f"\0{file.relative_to(root)}\0".encode() + file.read_bytes() for file in files]
    return digest(b"".join([sys.version.encode(), *parts]))


@functools.cache
def versions() -> str:
    """Return the versions of PyTorch and Triton, without those that are not installed."""
    texts: list[str] = []
    for package in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            texts.append(f"{package} {importlib.metadata.version(package)}")
    return " ".join(texts)


def default_path() -> Path:
    """Return $FUSION_CACHE_DIR, or ~/.cache/fusion_compiler."""
    folder = os.environ.get("FUSION_CACHE_DIR")
    return Path(folder) if folder else Path.home() / ".cache" / "fusion_compiler"


class Store:
    """A store keeps values by key: a value is anything that JSON holds, except None.

    path: the folder above the kinds' folders, which are created when the first record is written; by default
        `default_path()`.
    max_bytes: when the records of one kind outgrow it, the least recently used are removed, until nine
        tenths of it are left.

    Where a folder cannot be written, one FusionWarning says so, and the records live in memory,
    for this object alone. Nothing on disk raises.
    """

    def __init__(self, path: str | Path | None = None, max_bytes: int = DEFAULT_BYTES) -> None:
        self.path = Path(path) if path is not None else default_path()
        self.max_bytes = max_bytes
        self._memory: dict[str, Any] = {}
        self._on_disk = True
        self._writes = Counter[Kind]()

    def folder(self, kind: Kind) -> Path:
        return self.path / kind.folder

    def file(self, key: Key) -> Path:
        return self.folder(key.kind) / f"{key.digest}.json"

    def get(self, key: Key) -> Any:
        """Return the value last put under `key`, or None."""
        if key.digest in self._memory:
            return self._memory[key.digest]
        file = self.file(key)
        record = read_record(file) if is_own(file.parent) else None
        _log.debug("%s %s: %s", key.kind.name, key.digest[:12], "not on disk" if record is None else "read")
        if record is None:
            return None
        with contextlib.suppress(OSError):  # used now: the last to be evicted
            os.utime(file)
        return record["value"]

    def is_damaged(self, key: Key) -> bool:
        """True if there is a file for `key` that is no whole record of it."""
        file = self.file(key)
        return is_own(file.parent) and os.path.lexists(file) and read_record(file) is None

    def put(self, key: Key, value: Any) -> None:
        """Keep `value` under `key`. Raise TypeError if JSON cannot hold it."""
        text = _seal({"kind": key.kind.folder, "key": key.digest, "about": key.about, "value": value})
        if self._on_disk:
            try:
                self._write(key, text)
                return
            except OSError as error:
                self._give_up(error)
        self._memory[key.digest] = json.loads(text)["value"]

    def files(self, kind: Kind, names: re.Pattern[str] = RECORD) -> list[Path]:
        """Return the plain files of such names, sorted. Other files in the folder are not the store's."""
        folder = self.folder(kind)
        try:
            with os.scandir(folder) as entries:
                plain = [e.name for e in entries if e.is_file(follow_symlinks=False)]
        except OSError:
            return []
        return [folder / name for name in sorted(plain) if names.fullmatch(name) and is_own(folder)]

    def _write(self, key: Key, text: str) -> None:
        file = self.file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        if not is_own(file.parent):
            raise PermissionError(f"{file.parent} belongs to another user")
        handle, temporary = tempfile.mkstemp(prefix=f"{file.stem}.", suffix=".tmp", dir=file.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):  # nobody's record
                raise FileExistsError(f"{file} is not a regular file")
            os.replace(temporary, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if self._writes[key.kind] % WRITES_PER_CHECK == 0:
            self._evict(key.kind)
            self.remove_unfinished(key.kind)
        self._writes[key.kind] += 1

    def _evict(self, kind: Kind) -> None:
        """Remove the records not used for longest."""
        stats: list[tuple[float, int, Path]] = []
        for file in self.files(kind):
            with contextlib.suppress(OSError):  # it vanishes meanwhile
                about = file.stat()
                stats.append((about.st_mtime, about.st_size, file))
        total = sum(size for _, size, _ in stats)
        goal = self.max_bytes if total <= self.max_bytes else self.max_bytes * 9 // 10
        for _, size, file in sorted(stats):
            if total <= goal:
                break
            with contextlib.suppress(OSError):
                file.unlink()
                total -= size

    def remove_unfinished(self, kind: Kind, age: float = ABANDONED_SECONDS) -> None:
        """Remove what killed writers left at least `age` seconds ago."""
        for file in self.files(kind, UNFINISHED):
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime >= age:
                    file.unlink()

    def _give_up(self, error: OSError) -> None:
        self._on_disk = False
        is_file = self.path.exists() and not self.path.is_dir()
        reason = "it is a file, not a folder" if is_file else error
        text = f"{CacheError(path=self.path, detail=reason)}; until then every process tunes and plans again"
        warnings.warn(text, FusionWarning, stacklevel=3)


def is_own(folder: Path) -> bool:
    """True if a folder is this user's, or does not exist yet."""
    try:
        return not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return True
    except OSError:
        return False


def read_plain(file: Path) -> bytes:
    """Return the content of a plain file. Raise OSError for anything else: a pipe would wait for somebody to
    write."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{file} is not a regular file")
        return stream.read()


def _seal(record: dict[str, Any]) -> str:
    """Return a record as text, with a checksum of all that is in it."""
    return json.dumps({**record, "sha256": digest(json.dumps(record, sort_keys=True))}, sort_keys=True)


def read_record(file: Path) -> dict[str, Any] | None:
    """Return the record in `file` ({kind, key, about, value}), or None if it is not whole."""
    try:
        record = json.loads(read_plain(file))
        checksum = record.pop("sha256")
        is_whole = checksum == digest(json.dumps(record, sort_keys=True))
        return record if is_whole and record["key"] == file.stem else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
