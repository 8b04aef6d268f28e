"""The table of measured schedules: which rows apply, and what is said of a row that is malformed."""

from __future__ import annotations

import pytest

from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule import measured
from fusion_compiler.schedule.analysis import Analysis
from tests.nests import Nest

HEADER = ",".join(measured.COLUMNS)
SOURCE = "h200,sm_90,2026-11-22,6060cb2"


def row_sums(width: int) -> Analysis:
    """Return the analysis of the sums of 300 rows."""
    n = Nest({"r": (300, ROWS), "c": (width, COLS)})
    n.store("y", n.reduce("sum", n.load("x", "r", "c"), COLS), "r")
    return Analysis(n.nest())


def test_the_first_row_that_applies_is_used_and_positions_insert(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured.read(
        f"""{HEADER}
# A comment.
looped,100,,1 0 1,,{SOURCE}
looped,any,stored,2 0 2,,{SOURCE}
looped,any,only_reduced simple,4 0 4; -8 16 8 2,,{SOURCE}
looped,any,,9 0 9,,{SOURCE}

looped,any,only_reduced,5 0 5; 4 0 4,1,{SOURCE}
pointwise,any,,0 64 1,,{SOURCE}
"""
    )
    assert rows[2].traits == tuple(measured.TRAITS[name] for name in ("only_reduced", "simple"))
    assert rows[0].widest == 100 and rows[1].widest == measured.ANY and rows[4].position == 1
    monkeypatch.setattr(measured, "TABLE", rows)
    assert measured.shapes("looped", row_sums(100), "sm_90") == ((1, 0, 1), (5, 0, 5), (4, 0, 4))
    assert measured.shapes("looped", row_sums(101), "sm_90") == ((4, 0, 4), (5, 0, 5), (-8, 16, 8, 2))
    assert measured.shapes("cooperative", row_sums(101), "sm_90") == ()


def test_a_target_has_its_own_rows_or_those_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    other = "looped,any,,2 0 2,,b200,sm_100,2026-11-28,1"
    rows = measured.read(f"{HEADER}\nlooped,any,,1 0 1,,{SOURCE}\n{other}\n")
    monkeypatch.setattr(measured, "TABLE", rows)
    monkeypatch.setattr(measured, "TARGETS", ("sm_90", "sm_100"))
    shapes = [measured.shapes("looped", row_sums(64), target) for target in ("sm_90", "sm_100", "gfx942")]
    assert shapes == [((1, 0, 1),), ((2, 0, 2),), ((1, 0, 1),)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (f"rws,any,,1 0 1,,{SOURCE}", "unknown kind 'rws': write one of pointwise, .*, or add it to KINDS"),
        (f"looped,wide,,1 0 1,,{SOURCE}", "widest is 'wide': write a number of columns, or any"),
        (f"looped,any,tal,1 0 1,,{SOURCE}", "unknown trait 'tal': write some of .*, or add a function"),
        (f"looped,any,,1 0,,{SOURCE}", "malformed shape '1 0': write 3 or 4 integers for the kind looped"),
        (f"pointwise,any,,0 64 1; x 64 1,,{SOURCE}", "malformed shape 'x 64 1': write 3 integers"),
        (f"pointwise,any,,0 64 1;,,{SOURCE}", "malformed shape '': write 3 integers"),
        (f"looped,any,,1 0 1,-1,{SOURCE}", "position is '-1': write a place in .*, or nothing"),
        ("looped,any,,1 0 1,,h200,sm_90,,6060cb2", "write the device, target, date and commit"),
        ("looped,any,,1 0 1", "4 cells: write 9, kind,widest"),
    ],
)
def test_a_malformed_row_is_named_with_what_to_write(row: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^measured\.csv, line 3: {message}"):
        measured.read(f"{HEADER}\n# A comment.\n{row}\n")


def test_a_table_begins_with_its_columns() -> None:
    for text in ("", f"looped,any,,1 0 1,,{SOURCE}\n"):
        with pytest.raises(ValueError, match="write the columns kind,widest,traits"):
            measured.read(text)


def test_every_trait_is_named_by_a_row() -> None:
    used = {trait for row in measured.TABLE for trait in row.traits}
    assert used == set(measured.TRAITS.values())
