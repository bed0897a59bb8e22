"""A run that is asked for it measures the links between its workers, names the slow one, and stays the same run."""

from __future__ import annotations

import time
from types import SimpleNamespace
from unittest import mock

import pytest
from small_runs import Classify, make_job, train_job

from scaleray.profiling.links import EVERY_OTHER, slowest
from scaleray.records.profile_record import LinkRow
from scaleray.records.published import LinksMeasured
from scaleray.records.run_record import EventRecord, StepRecord
from scaleray.training.profile import link_probe, profiler
from scaleray.training.profile.profiler import LinkWatch
from scaleray.training.state.checkpointing import Control

BYTES_PER_S = 1e6


def trained(place, folder, one_way, asks):
    """What a rank of a training says of its links, of which rank 0 is asked once."""
    job, sources = make_job(
        Classify(32), {"stop.after": "4 steps", "batch.global_size": 6}, world_size=place.world_size
    )
    control, send = Control(), link_probe.dist.send
    if asks and place.rank == 0:
        control.wants_links.set()

    def carried(tensor, to, **options):
        if (place.rank, to) == one_way:
            time.sleep(tensor.numel() * tensor.element_size() / BYTES_PER_S)
        return send(tensor, to, **options)

    with mock.patch.object(link_probe.dist, "send", carried):
        finished = train_job(place, job, sources, folder=folder, control=control)
    told = [one for one in finished.messages if isinstance(one, LinksMeasured)]
    events = [one.text for one in finished.messages if isinstance(one, EventRecord) and "links" in one.text]
    return told, events, finished.weights


@pytest.mark.combination
def test_the_pair_of_a_slow_link_is_named_with_its_direction_and_no_weight_changes(gloo, tmp_path):
    (told, events, weights), *others = gloo.run(3, trained, str(tmp_path / "asked"), (2, 1), True)
    (links,) = told
    assert (links.step, links.source, links.to) == (1, "2", "1") and links.bytes_per_s < BYTES_PER_S
    assert links.bytes_per_s < 0.5 * links.usual_bytes_per_s
    assert len(events) == 1 and "from rank 2 to rank 1 is slow" in events[0], events
    assert all((told, events) == ([], []) for told, events, _ in others), "rank 0 speaks for all"
    plain = gloo.run(3, trained, str(tmp_path / "plain"), (2, 1), False)[0]
    assert plain[:2] == ([], []), "a run that is not asked measures nothing"
    assert weights.keys() == plain[2].keys() and all(weights[name].equal(plain[2][name]) for name in weights)


def test_two_ranks_say_that_there_is_nothing_to_hold_their_link_against(gloo, tmp_path):
    (links,), (event,), _ = gloo.run(2, trained, str(tmp_path), (0, 1), True)[0]
    assert links.usual_bytes_per_s is None and "is not known: two ranks have only one" in event and "MB/s" in event


def probed(place, limit_s):
    return len(link_probe.probe_links(place, limit_s=limit_s))


def test_no_pair_is_begun_when_the_time_is_over(gloo):
    assert gloo.run(3, probed, -1.0) == [1, 1, 0], "the first pair alone"
    assert gloo.run(3, probed, 60.0) == [2, 2, 2]


def rows(rate):
    return [LinkRow(one, other, rate(one, other), 1) for one in range(4) for other in range(4) if one != other]


def test_the_slowest_link_is_a_way_from_rank_to_rank_or_a_rank_with_all_others():
    assert slowest(rows(lambda one, other: 5.0 if (one, other) == (3, 1) else 100.0)) == ("3", "1", 5.0, 100.0)
    assert slowest(rows(lambda one, other: 5.0 if 2 in (one, other) else 100.0)) == ("2", EVERY_OTHER, 5.0, 100.0)
    assert slowest([LinkRow(0, 1, 9.0, 1), LinkRow(1, 0, 4.0, 1)]) == ("1", "0", 4.0, None)


def test_a_full_gpu_is_not_asked_for_more_memory(monkeypatch):
    """NCCL would take it for each pair; all ranks agree on that before any of them begins."""
    told = []
    place = SimpleNamespace(rank=0, world_size=2, device="cuda:0", all_reduce_max=lambda values: [1.0])
    monkeypatch.setattr(profiler, "_is_full", lambda device: False)
    monkeypatch.setattr(profiler, "probe_links", lambda *about, **more: 1 / 0)
    asks = SimpleNamespace(asks_for_links=lambda signals: True)
    watch = LinkWatch(place, asks, emit=told.append, guard=lambda watcher, look, otherwise, part: look())
    watch.after_step(StepRecord(7, 1.0, 8.0, 8, 0.1, None, 0.01, 0.0, 0.1))
    assert [event.text for event in told] == [
        "links between workers, not measured: a GPU has less than 1 GiB free for connections between pairs"
    ]
