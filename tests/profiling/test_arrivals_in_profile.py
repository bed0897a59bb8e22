"""What arrivals add to a profile: sums stay what they are, and no odd run may fail for it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from test_lateness import DDP, FSDP
from test_lateness import measured as arrivals_of

from scaleray.profiling.run_profile import run_profile
from scaleray.records.phases import Phase
from scaleray.records.profile_record import CollectiveRow, RankMeasurements
from scaleray.training.profile.phase_times import StepRows

STEPS = 100
FORWARD_S, COMMUNICATION_S = 0.04, (0.052, 0.002)


def measured(places, *, steps=(STEPS, STEPS)):
    """Two ranks, of which the second is 50 ms late to the last collective of every step."""
    found = []
    for rank, arrivals in enumerate(arrivals_of(places, delays={(1, 3): 0.05}, noise_s=0.0)):
        table = StepRows(("step", Phase.FORWARD, Phase.COMMUNICATION))
        parts = FORWARD_S + (rank * 0.05), COMMUNICATION_S[rank]
        table.add(np.array([[sum(parts), *parts]] * steps[rank]))
        found.append(
            RankMeasurements(
                rank=rank, node="here", device="cpu", first_step=5, num_steps=steps[rank], columns=table.columns,
                every=table.every, rows=table.rows, totals=table.totals, series=table.series,
                bucket_width=table.bucket_width, worst_gap=0.0, gap=0.0, arrivals=arrivals,
                collectives=[CollectiveRow(rank, "dp", 2, "all_reduce", 300, 3e6)],
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize("places", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_waiting_for_the_slowest_rank_is_taken_out_of_exposed_communication_and_nothing_is_lost(places):
    waiting, late = run_profile(measured(places)).ranks
    assert waiting.phases[Phase.STRAGGLER].median == pytest.approx(0.05, rel=1e-3)
    assert waiting.phases[Phase.COMMUNICATION].median == pytest.approx(0.002, rel=1e-2)
    assert late.phases[Phase.STRAGGLER].total == pytest.approx(0.0, abs=1e-4)
    for rank, before in zip((waiting, late), COMMUNICATION_S, strict=True):
        both = [rank.phases[part] for part in (Phase.COMMUNICATION, Phase.STRAGGLER)]
        assert sum(one.total for one in both) == pytest.approx(before * STEPS)
        assert np.sum([one.series for one in both], axis=0) == pytest.approx(np.full(STEPS, before))


def test_the_rate_of_a_link_is_measured_from_when_all_have_come():
    profile = run_profile(measured(DDP))
    first, second = profile.collectives
    # from the last rank at the first bucket to the end: 70 ms for 30 kB a step
    assert first.bus_bandwidth == second.bus_bandwidth == pytest.approx(3e6 / 101 / 0.072, rel=0.05)
    assert first.exposed_share > second.exposed_share
    assert [one.rank for one in profile.stragglers] == [1]


def test_ranks_with_other_numbers_of_steps_or_without_arrivals_are_told_as_far_as_can_be():
    unequal = run_profile(measured(DDP, steps=(STEPS, STEPS - 30)))
    assert [Phase.STRAGGLER in rank.phases for rank in unequal.ranks] == [True, False]
    alone = measured(DDP)
    alone[0] = dataclasses.replace(alone[0], arrivals=None)
    profile = run_profile(alone)
    assert profile.stragglers == [] and profile.ranks[1].late_s is None
    assert all(Phase.STRAGGLER not in rank.phases for rank in profile.ranks)
