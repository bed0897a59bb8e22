"""Verdicts on made-up steps whose faults are known."""

import dataclasses
import re

import numpy as np
import pytest
from made_up_steps import STEP_S, facts, made_up

from scaleray.cli.main import app
from scaleray.config.loading import known_keys
from scaleray.config.strategy_traits import TRAITS
from scaleray.profiling.verdict.advice import about_contention, about_little_work, advice_on
from scaleray.profiling.verdict.findings import Limit
from scaleray.profiling.verdict.signals import LateAt
from scaleray.profiling.verdict.verdict import LEAST_SHARE, evaluate
from scaleray.records.phases import Phase

CASES = {
    "input": (Limit.INPUT, Phase.INPUT, None, 1),
    "input of one rank": (Limit.INPUT, Phase.INPUT, 1, 1),
    "copy": (Limit.COPY, Phase.COPY, None, 1),
    "host": (Limit.HOST, Phase.OTHER, None, 1),
    "evaluation": (Limit.EVALUATION, Phase.EVALUATION, None, 1),
    "checkpoint": (Limit.CHECKPOINT, Phase.CHECKPOINT, None, 1),
    **{
        f"straggler in {phase}": (Limit.STRAGGLER, phase, 1, 1)
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER)
    },
    "straggler every second step": (Limit.STRAGGLER, Phase.FORWARD, 1, 2),
}


@pytest.mark.parametrize("size", [0.25, 0.1])
@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_named_and_what_removing_it_gives_is_known(name, size):
    limit, phase, rank, every = CASES[name]
    for seed in range(5):
        found = evaluate(made_up(seed, more=[(phase, rank, size * STEP_S, every)]), facts())
        assert found.limit is limit, found.sentence
        assert found.primary.gain == pytest.approx(1 + size, rel=0.04)
        assert found.primary.ranks == (() if rank is None else (rank,)), found.sentence
        assert found.primary.phase == (phase if limit is Limit.STRAGGLER else None)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_healthy_training_computes(ranks):
    for seed in range(30):
        found = evaluate(made_up(seed, ranks=ranks), facts(workers=ranks))
        assert found.limit is Limit.COMPUTE and found.others == (), found.sentence
        assert sum(found.shares.values()) == pytest.approx(1)


def test_one_hiccup_of_the_machine_names_nobody():
    signals = made_up(steps=50)
    signals.parts[Phase.FORWARD][1, 20] += 10 * STEP_S  # a sixth of all the time
    found = evaluate(signals, facts())
    assert found.limit is Limit.COMPUTE, found.sentence


def test_a_slow_link_is_no_straggler_and_a_straggler_no_slow_link():
    link = evaluate(made_up(link_s=0.3 * STEP_S), facts())
    assert link.limit is Limit.COMMUNICATION and not link.others
    assert link.primary.gain == pytest.approx(1.3, rel=0.03)
    late = evaluate(made_up(more=[(Phase.BACKWARD, 0, 0.3 * STEP_S, 1)]), facts())
    assert late.limit is Limit.STRAGGLER and late.primary.ranks == (0,) and not late.others


def test_all_slow_ranks_of_a_node_are_named_together():
    found = evaluate(
        made_up(ranks=8, more=[(Phase.FORWARD, rank, 0.3 * STEP_S, 1) for rank in (5, 6)]), facts(workers=8)
    )
    assert set(found.primary.ranks) == {5, 6} and found.primary.gain == pytest.approx(1.3, rel=0.05)


def test_of_two_faults_the_larger_is_primary_and_both_have_their_shares():
    more = [(Phase.FORWARD, 1, 0.3 * STEP_S, 1), (Phase.EVALUATION, None, 0.15 * STEP_S, 1)]
    found = evaluate(made_up(more=more), facts())
    assert [one.limit for one in (found.primary, *found.others)] == [Limit.STRAGGLER, Limit.EVALUATION]
    assert found.shares["straggler"] == pytest.approx(0.3 / 1.45, abs=0.02)
    assert found.shares["evaluation"] == pytest.approx(0.15 / 1.45, abs=0.02)


def test_the_place_where_gradients_begin_to_be_late_gives_the_layers():
    late_at = {1: LateAt(2, "blocks.2-3")}
    found = evaluate(made_up(more=[(Phase.BACKWARD, 1, 0.3 * STEP_S, 1)], late_at=late_at), facts())
    assert (found.primary.bucket, found.primary.layers) == (2, "blocks.2-3") and "blocks.2-3" in found.sentence
    forward = evaluate(made_up(more=[(Phase.FORWARD, 1, 0.3 * STEP_S, 1)], late_at=late_at), facts())
    assert forward.primary.bucket is None and "blocks" not in forward.sentence


def test_pauses_of_the_garbage_collector_are_the_hosts_wherever_they_fall():
    pauses = np.zeros((2, 40))
    pauses[:, ::5] = STEP_S
    found = evaluate(made_up(more=[(Phase.FORWARD, None, 0.2 * STEP_S, 5)], pauses=pauses), facts())
    assert found.limit is Limit.HOST and found.primary.cause == "garbage collection" and "gc.freeze" in found.sentence


def test_a_pause_longer_than_the_passes_is_not_counted_twice():
    pauses = np.zeros((2, 40))
    pauses[:, ::5] = 10 * STEP_S  # the collector also ran where the host's own time was measured
    found = evaluate(made_up(more=[(Phase.HOST, None, STEP_S, 5)], pauses=pauses), facts())
    assert found.limit is Limit.HOST and sum(found.shares.values()) == pytest.approx(1)


def test_steps_in_which_the_allocator_asked_again_are_memory_pressure():
    retries = np.zeros((2, 40))
    retries[:, ::5] = 1
    found = evaluate(made_up(more=[(Phase.BACKWARD, None, 0.2 * STEP_S, 5)], retries=retries), facts(device="cuda"))
    assert found.limit is Limit.MEMORY and found.primary.gain == pytest.approx(1.2, rel=0.05)
    always = evaluate(made_up(retries=np.ones((2, 40))), facts(device="cuda"))
    assert always.limit is Limit.COMPUTE and [one.limit for one in always.others] == [Limit.MEMORY]
    assert always.others[0].share is None and "100%" in always.others[0].evidence


def test_what_does_not_suffice_is_said():
    short = evaluate(made_up(steps=5), facts())
    assert short.limit is Limit.INCOMPLETE and "5 steady steps" in short.sentence and short.confidence == "unsure"
    unnamed = evaluate(made_up(unexplained=0.3), facts())
    assert unnamed.limit is Limit.INCOMPLETE and "30%" in unnamed.sentence
    found = evaluate(dataclasses.replace(made_up(), waits=None), facts())
    assert found.limit is Limit.COMPUTE and "stragglers" in found.notes[0]


def test_confidence_grows_with_steps():
    words = ["unsure", "likely", "sure"]
    more = [(Phase.FORWARD, 1, LEAST_SHARE * STEP_S * 2, 1)]
    few, many = (evaluate(made_up(steps=steps, more=more), facts()).confidence for steps in (12, 100))
    assert words.index(few) < words.index(many) == 2


@pytest.mark.parametrize("strategy", sorted(TRAITS))
@pytest.mark.parametrize("limit", Limit)
def test_what_is_advised_exists(strategy, limit):
    keys = set(known_keys())
    sections = {key.split(".")[0] for key in keys}
    for accumulation in (1, 4):
        asked = facts(strategy=strategy, accumulation_steps=accumulation)
        several = [
            advice_on(limit, asked, phase=phase, cause=cause) for phase in Phase for cause in ("", "garbage collection")
        ]
        for advice in [*several, about_contention(asked), about_little_work(asked)]:
            said = {word for word in re.findall(r"\b\w+\.\w+\b", advice.text) if word.split(".")[0] in sections}
            assert said <= keys and said <= set(advice.keys) <= keys, advice
            assert all(command.split()[1] in app for command in advice.commands)
