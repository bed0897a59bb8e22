"""Where the difference between two trainings lies."""

from made_up_steps import STEP_S, facts, made_up

from scaleray.profiling.verdict.verdict import evaluate
from scaleray.records.phases import Phase
from scaleray.studies.compare.speed import reason_of


def test_most_of_a_difference_is_named_from_either_side():
    usual = evaluate(made_up(), facts())
    slow = evaluate(made_up(1, more=[(Phase.INPUT, None, 0.3 * STEP_S, 1)]), facts())
    assert reason_of(usual, slow).startswith("most of it is input: 5.") and reason_of(usual, slow).endswith("more")
    assert reason_of(slow, usual).endswith("a step less")


def test_a_straggler_is_named_with_its_rank_and_phase():
    slow = evaluate(made_up(1, more=[(Phase.FORWARD, 1, 0.3 * STEP_S, 1)]), facts())
    assert "straggler (rank 1 in forward)" in reason_of(evaluate(made_up(), facts()), slow)


def test_nothing_is_said_without_a_profile_or_one_thing_that_explains_most():
    usual, short = evaluate(made_up(), facts()), evaluate(made_up(steps=4), facts())
    assert reason_of(usual, short) == reason_of(short, usual) == ""
    more = [(phase, None, 0.1 * STEP_S, 1) for phase in (Phase.INPUT, Phase.OTHER, Phase.EVALUATION)]
    assert reason_of(usual, evaluate(made_up(more=more), facts())) == ""
