"""The cache on disk: damage, killed writers, many processes, no room, no permission."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import fusion_compiler
from fusion_compiler.errors import FusionWarning
from fusion_compiler.runtime.cache import Cache, default_path

# Importing the package would import torch: the processes take its modules without its __init__.
BARE = f"""
import sys, types
sys.modules["fusion_compiler"] = package = types.ModuleType("fusion_compiler")
package.__path__ = [{str(Path(fusion_compiler.__file__).parent)!r}]
from fusion_compiler.runtime.cache import Cache
"""

# Writes one of two records of known content under one key, for ever.
WRITER = (
    BARE
    + """
import itertools
cache = Cache(sys.argv[1])
print("ready", flush=True)
for i in itertools.count():
    cache.put("shared", {"letter": "ab"[i % 2], "filling": "ab"[i % 2] * 5000})
"""
)


def start_writer(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def is_whole(record: dict[str, str]) -> bool:
    return record["letter"] in "ab" and record["filling"] == record["letter"] * 5000


def record_file(path: Path) -> Path:
    (file,) = path.glob("tuning-1/*.json")
    return file


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_values_come_back_in_another_process_too(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.get("a") is None
    values = {"a": 1, "b": [1.5, "x", {"y": False}], "c/../d\n\0": "\N{SNOWMAN}"}
    for key, value in values.items():
        cache.put(key, value)
    cache.put("a", 2)
    code = BARE + "print(Cache(sys.argv[1]).get('a'))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr
    assert Cache(tmp_path).list() == values | {"a": 2}
    with pytest.raises(TypeError):
        cache.put("bad", object())


def test_size_and_clear(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.size() == 0 and cache.list() == {}
    cache.put("a", "x" * 1000)
    assert 1000 < cache.size() < 2000
    (cache.path / f"{'0' * 64}.left.tmp").write_text("half")
    cache.clear()
    assert cache.size() == 0 and cache.get("a") is None and everything(tmp_path) == {"tuning-1"}


def test_what_the_cache_did_not_write_stays(tmp_path: Path) -> None:
    """In the folder that was named, and in its own below that."""
    cache = Cache(tmp_path, max_bytes=5000)
    cache.put("a", 1)
    names = ["package.json", "session.tmp", "tuning-1/x.json", "tuning-1/x.tmp", f"{'0' * 64}.json"]
    for name in names:
        (tmp_path / name).write_text("{}" + " " * 9000)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "tuning-1" / f"{'1' * 64}.json").symlink_to(tmp_path / "package.json")
    before = everything(tmp_path) - {f"tuning-1/{record_of(cache, 'a')}"}
    for i in range(66):  # until the size is looked at again
        cache.put(f"k{i}", "x" * 500)
    assert cache.size() < 7000 and before <= everything(tmp_path)
    cache.clear()
    assert everything(tmp_path) == before and not cache.list()


def record_of(cache: Cache, key: str) -> str:
    return cache._file(key).name


def test_killed_writers_leave_whole_records(tmp_path: Path) -> None:
    seen = 0
    for delay in random.Random(0).sample(range(50), 6):
        process = start_writer(tmp_path)
        time.sleep(delay / 1000)
        kill(process)
        record = Cache(tmp_path).get("shared")
        if record is not None:
            assert is_whole(record)
            seen += 1
    assert seen > 0
    Cache(tmp_path).put("shared", "replaced")
    assert Cache(tmp_path).get("shared") == "replaced"


def test_readers_beside_writers_see_whole_records(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path) for _ in range(2)]
    try:
        cache, letters, end = Cache(tmp_path), set[str](), time.monotonic() + 20
        while letters != {"a", "b"} and time.monotonic() < end:
            for _ in range(50):
                record = cache.get("shared")
                assert record is None or is_whole(record)
                letters |= {record["letter"]} if record else set()
        assert letters == {"a", "b"}
    finally:
        for writer in writers:
            kill(writer)


def test_damage_at_any_byte_is_absence(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    value = {"candidate": 3, "us": 12.5, "name": "layer_norm"}
    cache.put("key", value)
    file = record_file(tmp_path)
    whole = file.read_bytes()
    rng = random.Random(time.time_ns())
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        assert cache.get("key") in (None, value), (position, bytes(damaged))
        file.write_bytes(whole[:position])
        assert cache.get("key") is None
    cache.put("key", 1)
    assert Cache(tmp_path).get("key") == 1


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, b"null", b"[]", b'"x"', b"[" * 100_000, b"\xff\xfe", b'{"key": []}']
)
def test_foreign_content_is_ignored_and_replaced(tmp_path: Path, content: bytes) -> None:
    cache = Cache(tmp_path)
    cache.put("key", 1)
    record_file(tmp_path).write_bytes(content)
    (cache.path / f"{'0' * 64}.json").write_bytes(content)
    assert cache.get("key") is None and cache.list() == {}
    cache.put("key", 2)
    assert cache.get("key") == 2


def test_a_record_under_anothers_name_is_not_taken(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put("a", 1)
    content = record_file(tmp_path).read_bytes()
    cache.put("b", 2)
    for file in cache.files():
        file.write_bytes(content)
    assert cache.get("a") == 1 and cache.get("b") is None


def test_unwritable_folder_warns_once_and_keeps_in_memory(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    cache = Cache(occupied / "cache")
    with pytest.warns(FusionWarning, match="FUSION_CACHE_DIR") as caught:
        cache.put("a", (1, 2))
    assert len(caught) == 1 and str(occupied) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put("b", 2)
        assert cache.get("a") == [1, 2] and cache.list() == {"a": [1, 2], "b": 2}
        assert cache.get("c") is None and cache.size() == 0
        cache.clear()
    assert cache.get("a") is None and occupied.read_text() == "not a folder"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(__file__)])
def test_no_plain_file_where_a_record_belongs(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """It is neither read, which of a pipe would take for ever, nor replaced."""
    cache = Cache(tmp_path)
    cache.put("a", 1)
    file = record_file(tmp_path)
    file.unlink()
    make(file)
    sort = stat.S_IFMT(file.lstat().st_mode)
    assert cache.get("a") is None and cache.list() == {} and cache.size() == 0
    with pytest.warns(FusionWarning):
        cache.put("a", 2)
    assert cache.get("a") == 2
    cache.clear()
    assert stat.S_IFMT(file.lstat().st_mode) == sort
    assert everything(tmp_path) == {"tuning-1", f"tuning-1/{file.name}"}


def test_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for i in range(10):
        cache.put(f"k{i}", "x" * 1000)
        os.utime(cache._file(f"k{i}"), (1000 + i, 1000 + i))
    assert cache.get("k0") == "x" * 1000  # used now
    room = cache.size() // 2
    Cache(tmp_path, max_bytes=room).put("new", 1)
    left = set(Cache(tmp_path).list())
    assert {"k0", "k9", "new"} <= left and "k1" not in left
    assert Cache(tmp_path).size() <= room


def test_abandoned_files_are_removed(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.path.mkdir()
    old, young = (cache.path / f"{'0' * 64}.{name}.tmp" for name in ("old", "young"))
    for file in (old, young):
        file.write_text("half")
    os.utime(old, (1000, 1000))
    cache.put("a", 1)
    assert not old.exists() and young.exists()


def test_default_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "here"))
    assert default_path() == tmp_path / "here"
    monkeypatch.delenv("FUSION_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "fusion_compiler"


def test_records_are_plain_json(tmp_path: Path) -> None:
    Cache(tmp_path).put("a", {"us": 1.25})
    record = json.loads(record_file(tmp_path).read_text())
    assert record["key"] == "a" and record["value"] == {"us": 1.25}
