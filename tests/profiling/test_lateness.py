"""Who comes late, from arrivals with known delays and noise."""

from __future__ import annotations

import numpy as np
import pytest

from scaleray.profiling.lateness import aligned, find_stragglers, in_flight_s, waited_s
from scaleray.records.profile_record import Places, RankArrivals

STEP_S = 0.1
DDP = Places((), ("head", "blocks.2-3", "blocks.0-1"), (0, 1, 2), ("head", "blocks.2-3", "blocks.0-1"), meets_once=True)
FSDP = Places(
    ("", "blocks.0"),
    ("head", "blocks.1", "blocks.0"),
    (0, 1, 2),
    ("head", "blocks.1", "blocks.0"),
    meets_once=False,
    end_of_forward="blocks.1",
)


def measured(places, *, ranks=2, steps=100, delays=None, noise_s=0.001, seed=0, offsets=(0.0, 0.0), clocks=None):
    """Arrivals of ranks that compute 10 ms to each moment, and meet at the end. delays: seconds to add to the way to a
    moment, by (rank, moment), or an array of them for the steps."""
    draw = np.random.default_rng(seed)
    count = len(places.forward) + 1 + len(places.backward)
    ways = 0.01 + np.abs(draw.normal(0, noise_s, (ranks, steps, count)))
    for (rank, moment), delay in (delays or {}).items():
        ways[rank, :, moment] += delay
    times = np.zeros((ranks, steps, count))
    for moment in range(count):
        before = times[:, :, moment - 1] if moment else np.zeros((ranks, steps))
        if moment and not places.meets_once:
            before = np.broadcast_to(before.max(axis=0), before.shape)  # each collective is waited for
        times[:, :, moment] = before + ways[:, :, moment]
    times += STEP_S * np.arange(steps)[None, :, None]
    met = times[:, :, -1].max(axis=0) + 0.002
    begun_at = len(places.forward)
    return [
        RankArrivals(
            rank=rank,
            clock=clocks[rank] if clocks else "one",
            places=places,
            num_steps=steps,
            steps=np.arange(5, 5 + steps),
            begun=times[rank, :, begun_at] + offsets[rank % len(offsets)],
            came=np.delete(times[rank] - times[rank, :, [begun_at]].T, begun_at, axis=1).astype(np.float32),
            met=(met - times[rank, :, begun_at]).astype(np.float32),
        )
        for rank in range(ranks)
    ]


def stragglers(arrivals, **options):
    return find_stragglers(aligned(arrivals), step_s=STEP_S, **options)


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("places", [DDP, FSDP], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("moment", range(4))
def test_a_delay_is_named_with_its_rank_and_the_layers_where_it_was_born(places, ranks, moment):
    (found,) = stragglers(measured(places, ranks=ranks, delays={(1, moment): 0.02}))
    forward = len(places.forward)
    if moment < forward:
        assert (found.rank, found.phase, found.bucket, found.layers) == (1, "forward", None, places.forward[moment])
    elif moment == forward:
        assert (found.rank, found.phase, found.bucket, found.layers) == (1, "forward", None, places.end_of_forward)
    else:
        bucket = moment - forward - 1
        assert (found.rank, found.phase, found.bucket) == (1, "backward", bucket)
        assert found.layers == places.backward[bucket]
    assert found.late_s == pytest.approx(0.02, rel=0.1)
    assert found.share == pytest.approx(found.late_s / STEP_S)


@pytest.mark.parametrize("places", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_healthy_ranks_are_never_named_however_noisy_they_are(places):
    for seed in range(30):
        for noise_s in (0.0, 0.001, 0.05):
            for steps in (10, 60, 300):
                assert stragglers(measured(places, steps=steps, noise_s=noise_s, seed=seed, ranks=2 + seed % 3)) == []


def test_one_pause_names_nobody_and_a_delay_in_each_fourth_step_names_its_rank():
    pause = np.zeros(400)
    pause[17] = 30.0
    assert stragglers(measured(DDP, steps=400, delays={(1, 2): pause})) == []
    now_and_then = np.where(np.arange(400) % 4 == 0, 0.1, 0.0)
    (found,) = stragglers(measured(DDP, steps=400, delays={(1, 2): now_and_then}))
    assert (found.rank, found.bucket) == (1, 1)
    assert found.late_s == pytest.approx(0.025, rel=0.2)  # what it costs a step on average


def test_what_is_small_beside_the_step_or_too_short_to_be_sure_names_nobody():
    assert stragglers(measured(DDP, delays={(1, 2): 0.003})) == []
    assert stragglers(measured(DDP, delays={(1, 2): 0.003}), least_share=0.01) != []
    assert stragglers(measured(DDP, steps=7, delays={(1, 2): 0.05})) == []


def test_two_ranks_that_are_late_in_two_places_are_both_named_the_worse_one_first():
    found = stragglers(measured(FSDP, ranks=4, delays={(1, 4): 0.02, (3, 5): 0.05}))
    assert [(one.rank, one.bucket) for one in found] == [(3, 2), (1, 1)]


def test_clocks_of_other_hosts_are_put_together_by_the_ends_of_steps():
    options = {"delays": {(1, 2): 0.02}, "noise_s": 1e-4}
    apart = measured(DDP, offsets=(0.0, 12345.6), clocks=["one", "other"], **options)
    same, together = aligned(measured(DDP, **options)), aligned(apart)
    assert np.allclose(same.late, together.late, atol=1e-6)
    assert [one.rank for one in find_stragglers(together, step_s=STEP_S)] == [1]


def test_a_rank_waits_for_the_slowest_one_and_the_slowest_for_nobody():
    for places in (DDP, FSDP):
        waits = waited_s(aligned(measured(places, delays={(1, 3): 0.05}, noise_s=0.0)))
        assert waits[0] == pytest.approx(np.full(100, 0.05), rel=1e-3)
        assert waits[1] == pytest.approx(np.zeros(100), abs=1e-6)


def test_collectives_are_in_flight_from_the_last_rank_to_come_until_the_end():
    whole, alone = in_flight_s(aligned(measured(DDP, delays={(1, 1): 0.05}, noise_s=0.0)))
    assert alone == pytest.approx(np.full(100, 0.002), rel=1e-2)
    assert whole == pytest.approx(np.full(100, 0.022), rel=1e-2)


def test_groups_without_a_gradient_are_left_out_of_what_is_said():
    arrivals = measured(DDP, delays={(1, 3): 0.05})
    for one in arrivals:
        one.came[:, 1] = np.nan
    late = aligned(arrivals).late
    assert np.isnan(late[:, :, 2]).all()
    (found,) = find_stragglers(aligned(arrivals), step_s=STEP_S)
    assert found.rank == 1


def test_ranks_that_have_no_step_or_no_places_in_common_are_not_compared():
    one, other = measured(DDP)
    assert aligned([one]) is None
    assert aligned([one, measured(FSDP)[1]]) is None
    late = RankArrivals(**{**other.__dict__, "steps": other.steps + 1000})
    assert aligned([one, late]) is None
