"""The order of channels that a convolution takes follows the times that were measured."""

from __future__ import annotations

import pytest

from fusion_compiler.ops.convolution_times import (
    MEASURED,
    PASSES,
    WIDTHS,
    Convolution,
    convolution_of,
    faster_is_last,
    padding_refusal,
    shortest,
)


@pytest.mark.parametrize("row", MEASURED[::7], ids=lambda row: str(row[0]))
def test_a_measured_convolution_takes_the_order_that_was_faster(row: tuple[Convolution, ...]) -> None:
    shape, *times = row
    for name, first, last in zip(PASSES, *times, strict=True):
        for is_last in (False, True):
            kept, moved = (last, first) if is_last else (first, last)
            moves = moved + shape.copy_us < 0.9 * kept
            assert faster_is_last(shape, name, is_last) == (is_last != moves)


@pytest.mark.parametrize("name", PASSES)
def test_depthwise_convolutions_are_faster_with_channels_last(name: str) -> None:
    for batch, channels, side, kernel in ((128, 32, 112, 3), (32, 960, 14, 5), (64, 96, 56, 7)):
        shape = Convolution(batch, channels, channels, side, kernel, 1, channels)
        assert faster_is_last(shape, name, last=True)
        assert shortest(shape, name, True) < shortest(shape, name, False)
    dilated = Convolution(16, 256, 256, 65, 3, 1, 256, 2)
    assert not faster_is_last(dilated, name, last=False)
    assert faster_is_last(dilated, name, last=True) == (name == "dgrad")


@pytest.mark.parametrize("side", [112, 56, 28, 14, 7])
def test_inside_a_net_with_channels_last_no_pass_of_groups_turns_back(side: int) -> None:
    """The kernels around a convolution that did took more time than it gained, in RegNet's 24-wide groups."""
    for width in (4, 8, 12, 16, 24, 32, 48, 64):
        shape = Convolution(64, 3 * width, 3 * width, side, 3, 1, 3)
        assert faster_is_last(shape, "forward", last=True)


def test_groups_are_padded_to_the_next_fast_width() -> None:
    for width in range(2, 80):
        shape = Convolution(64, 12 * width, 24 * width, 14, 3, 1, 12)
        wider = [next((fast for fast in WIDTHS if fast >= n), None) for n in (width, 2 * width)]
        if None in wider or wider == [width, 2 * width]:
            assert shape.padded is None
            assert padding_refusal(shape, PASSES) == "no wider groups are faster"
        else:
            assert shape.padded is not None and [*shape.padded.widths] == wider
    for groups in (1, 24):  # a dense and a depthwise convolution
        assert Convolution(64, 24, 24, 14, 3, 1, groups).padded is None


def test_padding_is_refused_for_kernels_that_were_not_measured_and_for_few_pixels() -> None:
    assert padding_refusal(Convolution(64, 576, 576, 14, 3, 1, 24), PASSES) == ""
    assert padding_refusal(Convolution(64, 576, 576, 14, 5, 1, 24), PASSES) == "nothing alike was measured"
    assert padding_refusal(Convolution(1, 576, 576, 14, 3, 1, 24), PASSES).startswith("padding takes them")


def test_sequences_volumes_and_symbols_have_no_times() -> None:
    assert convolution_of((2, 8, 9), (8, 1, 3), (1,), (1,), 8) is None
    assert convolution_of((2, 8, 9, 9, 9), (8, 1, 3, 3, 3), (1, 1, 1), (1, 1, 1), 8) is None
    shape = convolution_of((2, 8, 4, 9), (8, 1, 3, 1), (1, 2), (1, 1), 8)
    assert shape == Convolution(2, 8, 8, 6, 3, 2, 8)
