"""Which order of channels a convolution takes, by the times that were measured."""

from __future__ import annotations

import pytest

from fusion_compiler.ir.convolution_times import MEASURED, PASSES, Convolution, convolution_of, faster_is_last


@pytest.mark.parametrize("row", MEASURED[::7], ids=lambda row: str(row[0]))
def test_a_measured_convolution_takes_the_order_that_was_faster(row: tuple[Convolution, ...]) -> None:
    shape, *times = row
    for name, first, last in zip(PASSES, *times, strict=True):
        for given in (False, True):
            here, there = (last, first) if given else (first, last)
            moves = there + shape.copy_us < 0.9 * here
            assert faster_is_last(shape, name, given) == (given != moves)


@pytest.mark.parametrize("name", PASSES)
def test_depthwise_convolutions_take_channels_last_unless_they_are_dilated(name: str) -> None:
    for batch, channels, side, kernel in ((128, 32, 112, 3), (32, 960, 14, 5), (64, 96, 56, 7)):
        shape = Convolution(batch, channels, channels, side, kernel, 1, channels)
        assert faster_is_last(shape, name, last=False)
    dilated = Convolution(16, 256, 256, 65, 3, 1, 256, 2)
    assert not faster_is_last(dilated, name, last=False)


def test_sequences_volumes_and_symbols_have_no_times() -> None:
    assert convolution_of((2, 8, 9), (8, 1, 3), (1,), (1,), 8) is None
    assert convolution_of((2, 8, 9, 9, 9), (8, 1, 3, 3, 3), (1, 1, 1), (1, 1, 1), 8) is None
    shape = convolution_of((2, 8, 4, 9), (8, 1, 3, 1), (1, 2), (1, 1), 8)
    assert shape == Convolution(2, 8, 8, 6, 3, 2, 8)
