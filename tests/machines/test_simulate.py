"""The simulated step has PyTorch's orders, and takes what is known of simple pipelines."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules

from fusion_compiler.machines.plan import Phase, Schedule
from fusion_compiler.machines.simulate import actions, in_flight, simulate

GPIPE, ONE_F_ONE_B, EAGER, INTERLEAVED, ZERO_BUBBLE, ZBV = Schedule


@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (4, 8), (4, 3)])
def test_equal_stages_take_what_the_formula_says(schedule: Schedule, stages: int, microbatches: int) -> None:
    step = simulate(schedule, [(2.0, 3.0)] * stages, [(0.0, 0.0)] * (stages - 1), stages, microbatches)
    assert step.us == 5.0 * (microbatches + stages - 1)
    assert step.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert len(step.events) == 2 * stages * microbatches


def test_interleaving_divides_the_bubble() -> None:
    plain = simulate(ONE_F_ONE_B, [(2.0, 2.0)] * 4, [(0.0, 0.0)] * 3, 4, 8)
    cut = simulate(INTERLEAVED, [(1.0, 1.0)] * 8, [(0.0, 0.0)] * 7, 4, 8)
    assert plain.us - 32 == pytest.approx(2 * (cut.us - 32))


@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_weight_gradients_fill_the_bubble(microbatches: int) -> None:
    plain = simulate(ONE_F_ONE_B, [(2.0, 4.0)] * 4, [(0.5, 0.5)] * 3, 4, microbatches)
    split = simulate(ZERO_BUBBLE, [(2.0, 4.0)] * 4, [(0.5, 0.5)] * 3, 4, microbatches)
    interleaved = simulate(INTERLEAVED, [(1.0, 2.0)] * 8, [(0.5, 0.5)] * 7, 4, microbatches)
    links = [(0.5, 0.5)] * 3 + [(0.0, 0.0)] + [(0.5, 0.5)] * 3  # the two in the middle share a machine
    v_shaped = simulate(ZBV, [(1.0, 2.0)] * 8, links, 4, microbatches)
    free = [
        simulate(schedule, [(1.0, 2.0)] * 4, [(0.0, 0.0)] * 3, 4, microbatches).bubble
        for schedule in (ONE_F_ONE_B, ZERO_BUBBLE)
    ]
    assert free == pytest.approx([3 / (3 + microbatches), 1 / (1 + microbatches)])
    assert split.bubble < plain.bubble and v_shaped.bubble < interleaved.bubble
    assert split.us < plain.us and v_shaped.us < interleaved.us


@pytest.mark.parametrize(("schedule", "local"), [(ZERO_BUBBLE, 1), (ZERO_BUBBLE, 2), (ZBV, 2)])
def test_a_backward_pass_is_split_into_gradients_of_inputs_and_of_weights(
    schedule: Schedule, local: int
) -> None:
    stages = 3 * local
    step = simulate(schedule, [(1.0, 2.0)] * stages, [(0.0, 0.0)] * (stages - 1), 3, 6)
    times = {(e.stage, e.phase, e.microbatch): (e.start_us, e.end_us) for e in step.events}
    assert len(times) == 3 * stages * 6 and {p for _, p, _ in times} == {*"FIW"}
    for stage in range(stages):
        for m in range(6):
            (begin, end), weight = times[stage, Phase.INPUT, m], times[stage, Phase.WEIGHT, m]
            assert end - begin == (1.0 if stage else 0.0) and weight[1] - weight[0] == (1.0 if stage else 2.0)
            assert begin >= times[stage, Phase.FORWARD, m][1] and weight[0] >= end
            assert stage == stages - 1 or begin >= times[stage + 1, Phase.INPUT, m][1]


def test_the_second_row_of_stages_of_zbv_goes_back() -> None:
    assert [ZBV.rank(stage, 4) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [ZERO_BUBBLE.rank(stage, 4) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_messages_wait_for_the_link() -> None:
    """Two forward passes of 1 us, messages of 10 us each: the second arrives at 21 us."""
    step = simulate(GPIPE, [(1.0, 0.0), (1.0, 0.0)], [(10.0, 0.0)], 2, 2, training=False)
    assert [e.start_us for e in step.events if e.stage == 1] == [11.0, 21.0]
    assert step.us == 22.0


def test_both_directions_of_a_link_are_used_at_a_time() -> None:
    forward = simulate(ONE_F_ONE_B, [(1.0, 1.0)] * 2, [(3.0, 0.0)], 2, 16).us
    both = simulate(ONE_F_ONE_B, [(1.0, 1.0)] * 2, [(3.0, 3.0)], 2, 16).us
    assert both < 2 * forward


def test_activations_in_flight() -> None:
    assert [in_flight(GPIPE, s, 4, 4, 8) for s in range(4)] == [8, 8, 8, 8]
    assert [in_flight(ONE_F_ONE_B, s, 4, 4, 8) for s in range(4)] == [4, 3, 2, 1]
    assert [in_flight(ONE_F_ONE_B, s, 4, 4, 2) for s in range(4)] == [2, 2, 2, 1]
    assert [in_flight(EAGER, s, 4, 4, 8) for s in range(4)] == [7, 5, 3, 1]


def test_more_microbatches_in_flight_hide_slow_links() -> None:
    """A microbatch goes through two stages and back in 6 us, and a stage computes for 2 us of these: three
    in flight fill the time, and two leave a third of it empty."""
    plain = simulate(ONE_F_ONE_B, [(1.0, 1.0)] * 2, [(1.0, 1.0)], 2, 16).us
    eager = simulate(EAGER, [(1.0, 1.0)] * 2, [(1.0, 1.0)], 2, 16).us
    assert (plain, eager) == (16 * 3 + 2, 16 * 2 + 4)


@pytest.mark.parametrize(
    ("machines", "local", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 8), (2, 3, 2), (3, 2, 3)]
)
def test_the_interleaved_order_is_torchs(machines: int, local: int, microbatches: int) -> None:
    rounds = max(1, microbatches // machines)
    block = microbatches // rounds
    for rank in range(machines):
        warmup = schedules._get_warmup_ops(rank, local, block, machines, microbatches)
        steady = local * microbatches - warmup

        def forward(step: int, rank: int = rank) -> int:
            return step // block % local * machines + rank

        def backward(step: int, rank: int = rank, warmup: int = warmup) -> int:
            return (local - 1 - (step - warmup) // block % local) * machines + rank

        order = schedules._get_1f1b_rank_ops(
            local, machines, warmup, steady, warmup, rank, forward, backward
        )  # fmt: skip
        theirs = [
            (a.stage_index, a.computation_type.name, a.microbatch_index) for a in order if a is not None
        ]
        ours = actions(INTERLEAVED, rank, local * machines, machines, microbatches)
        assert [(s, p.value, m) for s, p, m in ours] == [
            (s, "F" if t == "FORWARD" else "B", m) for s, t, m in theirs
        ]
        assert {p for _, p, _ in ours} == {Phase.FORWARD, Phase.BACKWARD}
