"""The store on disk: its keys, damage, killed writers, many processes, no room, no permission."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
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
from fusion_compiler.ir.device import device_spec
from fusion_compiler.options import Options
from fusion_compiler.runtime.stored import clear, entries_of
from fusion_compiler.support import store as store_module
from fusion_compiler.support.store import KINDS, PLAN, TUNING, Key, Kind, Store, default_path, read_record

# Importing the package would import torch: the processes take its modules without its __init__.
BARE = f"""
import sys, types
sys.modules["fusion_compiler"] = package = types.ModuleType("fusion_compiler")
package.__path__ = [{str(Path(fusion_compiler.__file__).parent)!r}]
from fusion_compiler.support.store import TUNING, Store

def key(name):
    return TUNING.key(kernels=name, device="gpu")
"""

# Writes one of two records of known content under one key, for ever.
WRITER = (
    BARE
    + """
import itertools
store = Store(sys.argv[1])
print("ready", flush=True)
for i in itertools.count():
    store.put(key("shared"), {"letter": "ab"[i % 2], "filling": "ab"[i % 2] * 5000})
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


def key(name: str) -> Key:
    return TUNING.key(kernels=name, device="gpu")


def records(store: Store) -> dict[str, object]:
    """The values on disk, by the digests of their keys."""
    intact = (record for file in store.files(TUNING) if (record := read_record(file)) is not None)
    return {record["key"]: record["value"] for record in intact}


def size(store: Store) -> int:
    return sum(entry.bytes for entry in entries_of(TUNING, store))


def remove_all(store: Store) -> None:
    clear(entries_of(TUNING, store), store)


def record_file(path: Path) -> Path:
    (file,) = path.glob("tuning-2/*.json")
    return file


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# -- keys -------------------------------------------------------------------------------------------


def inputs_of(kind: Kind) -> dict[str, object]:
    return {name: f"the {name}" for name in kind.inputs if name not in ("source", "versions")}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.inputs], ids=lambda kind: kind.name)
def test_a_key_needs_each_declared_input_and_depends_on_it(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(kind)
    keys = [kind.key(**inputs).digest]
    assert kind.key(**dict(reversed(inputs.items()))).digest == keys[0]
    for name in inputs:
        with pytest.raises(TypeError, match=f"other inputs: {name}$"):
            kind.key(**{n: v for n, v in inputs.items() if n != name})
        keys.append(kind.key(**(inputs | {name: "another"})).digest)
    for name, function in (("source", "source_digest"), ("versions", "versions")):
        with pytest.raises(TypeError, match=f"other inputs: {name}$"):  # the store computes it
            kind.key(**inputs, **{name: "given"})
        if name in kind.inputs:
            monkeypatch.setattr(store_module, function, lambda: "another")
            keys.append(kind.key(**inputs).digest)
    with pytest.raises(TypeError, match="other inputs: more"):
        kind.key(**inputs, more=1)
    assert len(set(keys)) == len(keys) == len(kind.inputs) + 1


def test_the_kinds_do_not_share_keys_or_folders_and_say_what_they_hold() -> None:
    same = [dataclasses.replace(kind, inputs=("x",)) for kind in KINDS]
    same.append(dataclasses.replace(same[0], version=same[0].version + 1))
    assert len({kind.key(x=1).digest for kind in same}) == len({kind.folder for kind in same}) == len(same)
    for kind in KINDS:
        assert kind.holds.startswith(f"A {kind.name} entry ") and kind.holds.endswith(".")


def test_an_input_without_a_text_is_an_error() -> None:
    """The text of an object that only has an address would be another one in each process."""
    spec, inputs = device_spec("h200"), inputs_of(PLAN)
    first = PLAN.key(**(inputs | {"device": spec}))
    other = PLAN.key(**(inputs | {"device": dataclasses.replace(spec, sms=spec.sms + 1)}))
    assert first.digest != other.digest and first.about["device"] == spec.name
    for value in (object(), {1, 2}, b"x", lambda: 0, Path("x"), Options):
        with pytest.raises(TypeError):
            PLAN.key(**(inputs | {"options": [value]}))


def test_the_digest_of_the_source_covers_code_and_the_measured_schedules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(fusion_compiler.__file__).parent
    table = shutil.copytree(package / "schedule", tmp_path / "schedule") / "measured.csv"
    monkeypatch.setattr(store_module, "__file__", str(tmp_path / "support" / "store.py"))
    digest = store_module.source_digest.__wrapped__
    before = digest()
    assert digest() == before
    table.write_text(table.read_text().replace("64 64 8", "64 64 4", 1))
    after = digest()
    (tmp_path / "schedule" / "new.py").write_text("")
    assert len({before, after, digest()}) == 3


# -- records ----------------------------------------------------------------------------------------


def test_values_come_back_in_another_process_too(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.get(key("a")) is None
    values = {"a": 1, "b": [1.5, "x", {"y": False}], "c/../d\n\0": "\N{SNOWMAN}"}
    for name, value in values.items():
        store.put(key(name), value)
    store.put(key("a"), 2)
    code = BARE + "print(Store(sys.argv[1]).get(key('a')))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr
    assert records(Store(tmp_path)) == {key(k).digest: v for k, v in (values | {"a": 2}).items()}
    with pytest.raises(TypeError):
        store.put(key("bad"), object())


def test_size_and_clear(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert size(store) == 0 and records(store) == {}
    store.put(key("a"), "x" * 1000)
    assert 1000 < size(store) < 2000
    (store.folder(TUNING) / f"{'0' * 64}.left.tmp").write_text("half")
    remove_all(store)
    assert size(store) == 0 and store.get(key("a")) is None and everything(tmp_path) == {"tuning-2"}


def test_what_the_store_did_not_write_stays(tmp_path: Path) -> None:
    """In the folder that was named, and in its own below that."""
    store = Store(tmp_path, max_bytes=5000)
    store.put(key("a"), 1)
    names = ["package.json", "session.tmp", "tuning-2/x.json", "tuning-2/x.tmp", f"{'0' * 64}.json"]
    for name in names:
        (tmp_path / name).write_text("{}" + " " * 9000)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "tuning-2" / f"{'1' * 64}.json").symlink_to(tmp_path / "package.json")
    before = everything(tmp_path) - {f"tuning-2/{store.file(key('a')).name}"}
    for i in range(66):  # until the size is looked at again
        store.put(key(f"k{i}"), "x" * 500)
    assert size(store) < 7000 and before <= everything(tmp_path)
    remove_all(store)
    assert everything(tmp_path) == before and not records(store)


def test_killed_writers_leave_whole_records(tmp_path: Path) -> None:
    seen = 0
    for delay in random.Random(0).sample(range(50), 6):
        process = start_writer(tmp_path)
        time.sleep(delay / 1000)
        kill(process)
        record = Store(tmp_path).get(key("shared"))
        if record is not None:
            assert is_whole(record)
            seen += 1
    assert seen > 0
    Store(tmp_path).put(key("shared"), "replaced")
    assert Store(tmp_path).get(key("shared")) == "replaced"


def test_readers_beside_writers_see_whole_records(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path) for _ in range(2)]
    try:
        store, letters, end = Store(tmp_path), set[str](), time.monotonic() + 20
        while letters != {"a", "b"} and time.monotonic() < end:
            for _ in range(50):
                record = store.get(key("shared"))
                assert record is None or is_whole(record)
                letters |= {record["letter"]} if record else set()
        assert letters == {"a", "b"}
    finally:
        for writer in writers:
            kill(writer)


def test_damage_at_any_byte_is_absence(tmp_path: Path) -> None:
    store = Store(tmp_path)
    value = {"candidate": 3, "us": 12.5, "name": "layer_norm"}
    store.put(key("key"), value)
    file = record_file(tmp_path)
    content = file.read_bytes()
    rng = random.Random(time.time_ns())
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        assert store.get(key("key")) in (None, value), (position, bytes(damaged))
        file.write_bytes(content[:position])
        assert store.get(key("key")) is None
    store.put(key("key"), 1)
    assert Store(tmp_path).get(key("key")) == 1


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, b"null", b"[]", b'"x"', b"[" * 100_000, b"\xff\xfe", b'{"key": []}']
)
def test_foreign_content_is_ignored_and_replaced(tmp_path: Path, content: bytes) -> None:
    store = Store(tmp_path)
    store.put(key("key"), 1)
    record_file(tmp_path).write_bytes(content)
    (store.folder(TUNING) / f"{'0' * 64}.json").write_bytes(content)
    assert store.get(key("key")) is None and records(store) == {}
    store.put(key("key"), 2)
    assert store.get(key("key")) == 2


def test_a_record_under_anothers_name_is_not_taken(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(key("a"), 1)
    content = record_file(tmp_path).read_bytes()
    store.put(key("b"), 2)
    for file in store.files(TUNING):
        file.write_bytes(content)
    assert store.get(key("a")) == 1 and store.get(key("b")) is None


def test_unwritable_folder_warns_once_and_keeps_in_memory(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    store = Store(occupied / "cache")
    with pytest.warns(FusionWarning, match="FUSION_CACHE_DIR") as caught:
        store.put(key("a"), (1, 2))
    assert len(caught) == 1 and str(occupied) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.put(key("b"), 2)
        assert store.get(key("a")) == [1, 2] and store.get(key("b")) == 2
        assert store.get(key("c")) is None and size(store) == 0
        remove_all(store)
    assert Store(occupied / "cache").get(key("a")) is None and occupied.read_text() == "not a folder"
    with pytest.warns(FusionWarning, match=f"{occupied} cannot be used: it is a file, not a folder"):
        Store(occupied).put(key("a"), 1)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(__file__)])
def test_no_plain_file_where_a_record_belongs(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """It is neither read, which of a pipe would take for ever, nor replaced."""
    store = Store(tmp_path)
    store.put(key("a"), 1)
    file = record_file(tmp_path)
    file.unlink()
    make(file)
    sort = stat.S_IFMT(file.lstat().st_mode)
    assert store.get(key("a")) is None and records(store) == {} and size(store) == 0
    with pytest.warns(FusionWarning):
        store.put(key("a"), 2)
    assert store.get(key("a")) == 2
    remove_all(store)
    assert stat.S_IFMT(file.lstat().st_mode) == sort
    assert everything(tmp_path) == {"tuning-2", f"tuning-2/{file.name}"}


def test_a_folder_of_another_users_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path).put(key("a"), 1)
    before, owner = everything(tmp_path), os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: owner)
    store = Store(tmp_path)
    assert store.get(key("a")) is None and not store.is_damaged(key("a")) and not store.files(TUNING)
    with pytest.warns(FusionWarning, match="belongs to another user"):
        store.put(key("b"), 1)
    remove_all(store)
    assert store.get(key("b")) == 1 and everything(tmp_path) == before


def test_least_recently_used_go_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for i in range(10):
        store.put(key(f"k{i}"), "x" * 1000)
        os.utime(store.file(key(f"k{i}")), (1000 + i, 1000 + i))
    assert store.get(key("k0")) == "x" * 1000  # used now
    room = size(store) // 2
    Store(tmp_path, max_bytes=room).put(key("new"), 1)
    left = {name for name in ("k0", "k1", "k9", "new") if key(name).digest in records(Store(tmp_path))}
    assert left == {"k0", "k9", "new"}
    assert size(Store(tmp_path)) <= room


def test_abandoned_files_are_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.folder(TUNING).mkdir(parents=True)
    old, young = (store.folder(TUNING) / f"{'0' * 64}.{name}.tmp" for name in ("old", "young"))
    for file in (old, young):
        file.write_text("half")
    os.utime(old, (1000, 1000))
    store.put(key("a"), 1)
    assert not old.exists() and young.exists()


def test_default_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "here"))
    assert default_path() == tmp_path / "here"
    monkeypatch.delenv("FUSION_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "fusion_compiler"


def test_records_are_plain_json(tmp_path: Path) -> None:
    Store(tmp_path).put(key("a"), {"us": 1.25})
    record = json.loads(record_file(tmp_path).read_text())
    assert record["key"] == key("a").digest and record["value"] == {"us": 1.25}
    assert record["about"] == {"device": "gpu", "versions": store_module.versions()}
