"""Keep small records on disk that survive anything: concurrent processes, kill -9, damaged files.

A record is one file, `<sha256 of the key>.json`, that holds its key, its value and a checksum. It
is written under another name, flushed to the disk and moved into place, so a reader sees the whole
old record, the whole new one, or none. What is not a whole record (truncated, flipped bits,
written by something else) counts as absent and is replaced by the next write.

The folder that a user names may hold anything. Records lie in one of their own below it, and only plain files
whose names are such a hash are ever read, replaced or removed there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from fusion_compiler.errors import CacheError, FusionWarning

DEFAULT_BYTES = 64 * 2**20
FOLDER = "tuning-1"  # of the records; another number for another form of them
PLANS = "plans-1"  # and of those that are decisions about a whole graph
REWRITES = "rewrites-1"  # and of what the rewrites made of one
RECORD = re.compile(r"[0-9a-f]{64}\.json")
UNFINISHED = re.compile(r"[0-9a-f]{64}\.\w+\.tmp")
# A writer that was killed leaves its unfinished file behind; younger ones may still be written.
ABANDONED_SECONDS = 3600.0
# The size is looked at once in so many writes of one process: a listing costs more than a write.
WRITES_PER_CHECK = 64


def default_path() -> Path:
    """Return $FUSION_CACHE_DIR, or ~/.cache/fusion_compiler."""
    folder = os.environ.get("FUSION_CACHE_DIR")
    return Path(folder) if folder else Path.home() / ".cache" / "fusion_compiler"


class Cache:
    """A cache keeps records by key: a value is anything that JSON holds, except None.

    path: the folder above the records' folder, which is created when the first record is written; by default
        `default_path()`.
    max_bytes: when the records outgrow it, those not used for longest go, down to nine tenths.
    folder: the name of the records' folder.

    Where the folder cannot be written, one FusionWarning says so, and the records live in memory,
    for this object alone. Nothing that is found on disk raises.
    """

    def __init__(
        self, path: str | Path | None = None, max_bytes: int = DEFAULT_BYTES, folder: str = FOLDER
    ) -> None:
        self.path = (Path(path) if path is not None else default_path()) / folder
        self.max_bytes = max_bytes
        self._memory: dict[str, Any] = {}
        self._on_disk = True
        self._writes = 0

    def get(self, key: str) -> Any:
        """Return the value last put under `key`, or None."""
        if key in self._memory:
            return self._memory[key]
        file = self._file(key)
        record = read_record(file)
        if record is None or record["key"] != key:
            return None
        with contextlib.suppress(OSError):  # used now: the last to be evicted
            os.utime(file)
        return record["value"]

    def is_damaged(self, key: str) -> bool:
        """True if there is a file for `key` that is no whole record of it."""
        record = read_record(file := self._file(key))
        return os.path.lexists(file) and (record is None or record["key"] != key)

    def put(self, key: str, value: Any) -> None:
        """Keep `value` under `key`. Raise TypeError when JSON cannot hold it."""
        text = _seal(key, value)
        if self._on_disk:
            try:
                self._write(self._file(key), text)
                return
            except OSError as error:
                self._give_up(error)
        self._memory[key] = json.loads(text)["value"]

    def list(self) -> dict[str, Any]:
        """Return all records as {key: value}."""
        records = (read_record(file) for file in self.files())
        return {r["key"]: r["value"] for r in records if r is not None} | self._memory

    def size(self) -> int:
        """Return the bytes on disk."""
        return sum(size for _, size, _ in self._stats())

    def clear(self) -> None:
        """Remove every record, and what killed writers left."""
        self._memory.clear()
        for file in [*self.files(), *self.files(UNFINISHED)]:
            with contextlib.suppress(OSError):
                file.unlink()

    def files(self, names: re.Pattern[str] = RECORD) -> list[Path]:
        """Return the plain files of such names, sorted. Other files in the folder are not the cache's."""
        try:
            with os.scandir(self.path) as entries:
                plain = [e.name for e in entries if e.is_file(follow_symlinks=False)]
        except OSError:
            return []
        return [self.path / name for name in sorted(plain) if names.fullmatch(name)]

    def _file(self, key: str) -> Path:
        return self.path / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def _stats(self) -> list[tuple[float, int, Path]]:
        """Return (last use, bytes, file) of each record, without those that vanish meanwhile."""
        stats: list[tuple[float, int, Path]] = []
        for file in self.files():
            with contextlib.suppress(OSError):
                about = file.stat()
                stats.append((about.st_mtime, about.st_size, file))
        return stats

    def _write(self, file: Path, text: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f"{file.stem}.", suffix=".tmp", dir=self.path)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):  # nobody's record
                raise FileExistsError(f"{file} is no plain file")
            os.replace(temporary, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if self._writes % WRITES_PER_CHECK == 0:
            self._evict()
        self._writes += 1

    def _evict(self) -> None:
        """Remove the records not used for longest, and what killed writers left."""
        stats = sorted(self._stats(), key=lambda stat: stat[0])
        total = sum(size for _, size, _ in stats)
        goal = self.max_bytes if total <= self.max_bytes else self.max_bytes * 9 // 10
        for _, size, file in stats:
            if total <= goal:
                break
            with contextlib.suppress(OSError):
                file.unlink()
                total -= size
        for file in self.files(UNFINISHED):
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime > ABANDONED_SECONDS:
                    file.unlink()

    def _give_up(self, error: OSError) -> None:
        self._on_disk = False
        text = CacheError(path=self.path, detail=error)
        warnings.warn(f"{text}; until then tuning is repeated in every process", FusionWarning, stacklevel=3)


def is_own(folder: Path) -> bool:
    """True if a folder is this user's, or does not exist yet."""
    try:
        return not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _checksum(key: str, value: str) -> str:
    return hashlib.sha256(f"{key}\0{value}".encode()).hexdigest()


def _seal(key: str, value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return json.dumps({"key": key, "value": value, "sha256": _checksum(key, text)}, sort_keys=True)


def read_plain(file: Path) -> bytes:
    """Return the content of a plain file. Raise OSError for anything else: a pipe would wait for somebody to
    write."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{file} is no plain file")
        return stream.read()


def read_record(file: Path) -> dict[str, Any] | None:
    """Return the record in `file` ({key, value, sha256}), or None if it is not whole."""
    try:
        record = json.loads(read_plain(file))
        text = json.dumps(record["value"], sort_keys=True)
        return record if record["sha256"] == _checksum(record["key"], text) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
