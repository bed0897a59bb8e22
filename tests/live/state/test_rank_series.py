"""Series of ranks: what each says of itself, what comes of all together, and how many there are."""

import dataclasses
import math

import pytest
from small_runs import Classify, train_alone

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.live.state.rank_series import ComparedRanks, rank_series
from scaleray.live.state.series import by_metric, label_value
from scaleray.records.phases import PARTS
from scaleray.records.published import RankSample

RUN = {"run_name": "a", "run_id": "1"}
MOST_SERIES_OF_A_RANK = 30


def sample(rank, world_size=2, **more):
    values = {"rank": rank, "node": "10.0.0.1", "world_size": world_size, "step": 8, "step_at": 1e9, **more}
    return RankSample(**values)


def compared(*samples):
    ranks = ComparedRanks()
    for one in samples:
        ranks.take_sample(one)
    return ranks


def values(ranks, metric):
    return {one.labels.get("rank", "run"): one.value for one in by_metric(ranks.series(**RUN)).get(metric, ())}


def test_a_sample_of_a_real_training_gives_series_whose_labels_are_those_of_the_table():
    finished = train_alone(Classify(), {"stop.after": "4 steps", "monitoring.every_s": 1e-6})
    samples = [message for message in finished.messages if isinstance(message, RankSample)]
    assert samples[0].step == 2, "the first step compiles and fills caches"
    series = rank_series(samples[0], **RUN)
    assert {one.metric for one in series} == {
        names.STEP_TIME_S, live.PHASE_S, live.MEMORY_BYTES, live.MEMORY_LIMIT_BYTES, live.LAST_STEP_TIMESTAMP_S
    }  # fmt: skip
    assert all(set(one.labels) == set(one.metric.all_labels) for one in series)
    assert 0 not in [one.value for one in series], "what cannot be measured on a CPU is absent"
    phases = sum(one.value for one in series if one.metric is live.PHASE_S)
    assert phases == pytest.approx(samples[0].step_time_s, rel=0.02)


def test_1024_ranks_with_everything_that_can_be_measured_have_at_most_30_series_each():
    everything = {
        "step_time_s": 0.1,
        "phases": {part.value: 0.01 for part in PARTS},
        "memory": dict.fromkeys(("used", "resident", "peak", "rounding", "cached", "stranded", "largest_hole"), 9),
        "memory_limit_bytes": 99,
    }
    ranks = ComparedRanks()
    for rank in range(1024):
        ranks.take_sample(sample(rank, 1024, **everything, ahead_s=(0.2, 0.1)))
    compared_ones = [one for one in ranks.series(**RUN) if one.metric is not live.LINK_RATIO]
    assert len(ranks.series(**RUN)) == 1024 + 1, "the state of the links is one for all ranks"
    of_ranks = [one for each in ranks.samples.values() for one in rank_series(each, **RUN)] + compared_ones
    counted = {}
    for one in of_ranks:
        counted[one.labels["rank"]] = counted.get(one.labels["rank"], 0) + 1
    assert len(counted) == 1024 and max(counted.values()) <= MOST_SERIES_OF_A_RANK
    assert len({(one.metric, *one.labels.values()) for one in of_ranks}) == len(of_ranks) <= 30 * 1024
    assert {one.metric for one in of_ranks} == {metric for metric in names.TABLE if metric.is_by_rank}


def test_the_rank_that_is_least_ahead_of_the_common_end_is_late_by_the_difference():
    ranks = compared(sample(0, ahead_s=(0.30, 0.10)), sample(1, ahead_s=(0.28, 0.02)))
    assert values(ranks, live.LATENESS_S) == {"0": 0.0, "1": pytest.approx(0.08)}


def test_lateness_needs_all_ranks_and_a_place_that_all_came_by():
    assert values(compared(sample(0, 3, ahead_s=(0.1,)), sample(1, 3, ahead_s=(0.2,))), live.LATENESS_S) == {}
    assert values(compared(sample(0, ahead_s=(0.1,)), sample(1)), live.LATENESS_S) == {}
    ranks = compared(sample(0, ahead_s=(0.5, math.nan)), sample(1, ahead_s=(0.2, 0.1)))
    assert values(ranks, live.LATENESS_S) == {"0": 0.0, "1": pytest.approx(0.3)}


def test_a_link_that_becomes_slow_falls_behind_its_own_best_and_a_late_rank_does_not_make_it_so():
    ranks = compared(sample(0, ahead_s=(0.02,)), sample(1, ahead_s=(0.02,)))
    assert values(ranks, live.LINK_RATIO) == {"run": 1.0}
    ranks.take_sample(sample(0, ahead_s=(0.52,)))
    assert values(ranks, live.LINK_RATIO) == {"run": 1.0}, "rank 1 came late: nobody waits for the link"
    ranks.take_sample(sample(0, ahead_s=(0.1,)))
    ranks.take_sample(sample(1, ahead_s=(0.1,)))
    assert values(ranks, live.LINK_RATIO) == {"run": pytest.approx(0.2)}


def test_transfers_of_less_than_a_scheduler_takes_are_not_told_apart():
    ranks = compared(sample(0, ahead_s=(1e-5,)), sample(1, ahead_s=(1e-5,)))
    ranks.take_sample(sample(0, ahead_s=(9e-4,)))
    ranks.take_sample(sample(1, ahead_s=(9e-4,)))
    assert values(ranks, live.LINK_RATIO) == {"run": 1.0}


def test_a_transfer_that_is_a_small_part_of_the_step_says_nothing_of_the_link():
    ranks = compared(*(sample(rank, ahead_s=(0.002,), step_time_s=0.1) for rank in (0, 1)))
    for rank in (0, 1):
        ranks.take_sample(sample(rank, ahead_s=(0.01,), step_time_s=0.1))
    assert values(ranks, live.LINK_RATIO) == {"run": 1.0}
    for rank in (0, 1):
        ranks.take_sample(sample(rank, ahead_s=(0.1,), step_time_s=0.2))
    assert values(ranks, live.LINK_RATIO) == {"run": pytest.approx(0.4)}


def test_a_group_of_another_size_begins_again():
    ranks = compared(*(sample(rank, 3, ahead_s=(0.1,)) for rank in range(3)))
    ranks.take_sample(sample(0, 2, ahead_s=(0.1,)))
    assert list(ranks.samples) == [0]


def test_exposed_communication_is_the_mean_share_of_all_ranks_and_absent_before_a_sample():
    assert compared().exposed_share() is None
    waits = {"exposed_communication": 0.1}
    ranks = compared(sample(0, step_time_s=0.5, phases=waits), sample(1, step_time_s=0.25, phases=waits))
    assert ranks.exposed_share() == pytest.approx(0.3)


def test_label_values_keep_any_text_but_what_terminals_obey():
    assert label_value('a"b\\c{}') == 'a"b\\c{}'
    assert label_value("a\nb\x1b[31m") == "a b [31m"
    assert len(label_value("x" * 5000)) == 300 and label_value("x" * 5000).endswith("…")


def test_a_sample_crosses_processes_as_it_is():
    import pickle

    one = sample(1, ahead_s=(0.1,), phases={"forward": 0.1})
    assert dataclasses.asdict(pickle.loads(pickle.dumps(one))) == dataclasses.asdict(one)
