"""The bubble formulas: published values, limits, and a simulation of the schedules they describe."""

import itertools

import pytest

from scaleray.config.recipe.pipeline_bubble import SCHEDULES, bubble_over_ideal, bubble_share, runs, suits


@pytest.mark.parametrize(
    ("num_micro_batches", "stages_per_worker", "expected"),
    [(1, 1, 7.0), (8, 1, 0.875), (32, 1, 0.21875), (32, 8, 0.02734375)],
)
def test_published_values_for_eight_workers(num_micro_batches, stages_per_worker, expected):
    # https://huggingface.co/spaces/nanotron/ultrascale-playbook, pipeline parallelism
    schedule = "1f1b" if stages_per_worker == 1 else "interleaved_1f1b"
    sizes = {"num_workers": 8, "num_micro_batches": num_micro_batches, "stages_per_worker": stages_per_worker}
    assert bubble_over_ideal(schedule, **sizes) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shares_lie_between_0_and_1_fall_with_micro_batches_and_vanish_for_one_worker(schedule):
    shares = [bubble_share(schedule, num_workers=4, num_micro_batches=m, stages_per_worker=2) for m in (1, 2, 4, 64)]
    assert all(0 < b < a < 1 for a, b in itertools.pairwise(shares))
    assert bubble_share(schedule, num_workers=1, num_micro_batches=3) == 0


def test_zero_bubble_is_a_third_of_1f1b_where_the_three_passes_take_equally_long():
    sizes = {"num_workers": 4, "num_micro_batches": 6}
    assert bubble_over_ideal("zero_bubble", **sizes) == pytest.approx(bubble_over_ideal("1f1b", **sizes) / 3)


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5, 8])
def test_gpipe_is_what_a_simulation_gives(num_workers, num_micro_batches):
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * num_workers

    def run(kind, worker, number, duration, after):
        free[worker] = ends[kind, worker, number] = max(free[worker], after) + duration

    for number in range(num_micro_batches):
        for worker in range(num_workers):
            run("forward", worker, number, 1.0, ends.get(("forward", worker - 1, number), 0.0))
    for number in range(num_micro_batches):
        for worker in reversed(range(num_workers)):
            run("backward", worker, number, 2.0, ends.get(("backward", worker + 1, number), 0.0))
    step, work = max(free), 3.0 * num_micro_batches
    sizes = {"num_workers": num_workers, "num_micro_batches": num_micro_batches}
    assert bubble_share("gpipe", **sizes) == pytest.approx((step - work) / step)


def test_runs_use_every_micro_batch_once_in_numbers_that_suit():
    for schedule in SCHEDULES:
        for number in range(1, 30):
            found = runs(schedule, num_workers=4, num_micro_batches=number)
            assert sum(found) == number
            assert all(suits(schedule, num_workers=4, num_micro_batches=n) for n in found)
    assert runs("interleaved_1f1b", num_workers=2, num_micro_batches=5) == [4, 1]
    assert runs("1f1b", num_workers=2, num_micro_batches=5) == [5]


def test_sizes_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="is not one of gpipe"):
        bubble_over_ideal("breadth first", num_workers=2, num_micro_batches=2)
    with pytest.raises(ValueError, match="at least 1"):
        bubble_over_ideal("1f1b", num_workers=2, num_micro_batches=0)
