"""What `scaleray verify` says about mistakes that are planted, and about the same trainings without them."""

from pathlib import Path

import pytest
from planted_mistakes import PLANTED, as_markdown, judge_planted, judge_sound, said

DOCS = Path(__file__).parent / "planted_mistakes.md"
CHEAP = (
    "means of ranks averaged", "updates not sent", "updates in bf16", "evaluation averages means", "schedule one step ahead",
    "optimizer not restored", "same masks after a resume", "momentum not averaged", "trained weights for the average",
    "buffers of the start saved", "position a batch ahead", "weight kept and given", "average stays in place",
    "left over not restored", "statistics not averaged", "less dropout", "momentum in bf16", "rows in bf16", "biases summed again",
    "inner momentum cleared", "pipeline replicas not summed", "tied gradient twice",
    "norm of own parts", "parts not summed in a stage", "divided by all workers", "every part counts its loss",
    "replicas read the same rows", "means of parts averaged", "context draws apart", "norm lacks the experts",
)  # fmt: skip
"""One of each kind of evidence."""


@pytest.mark.parametrize(
    "name",  # the tests of the mismatches find the others in their own way
    [*CHEAP[:2], *(pytest.param(name, marks=pytest.mark.combination) for name in CHEAP[2:])],
)
def test_a_planted_mistake_is_found_and_named(gloo, name):
    outcomes = gloo.run(PLANTED[name].world_size, judge_few_steps, name)[0]
    assert said(outcomes).split("; ")[0] == PLANTED[name].expected, outcomes


def judge_few_steps(place, name):
    return judge_planted(place, name, steps=8, accumulation=[1])


@pytest.mark.parametrize("name", PLANTED)
def test_what_a_mistake_changes_is_there(name):
    with PLANTED[name].plant():
        pass


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_verify_says_of_every_mistake_what_the_docs_say(gloo, name):
    outcomes = gloo.run(PLANTED[name].world_size, judge_planted, name)[0]
    assert (said(outcomes).split("; ")[0] or "-") == PLANTED[name].said, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_the_same_training_without_the_mistake_passes(gloo, name):
    outcomes = gloo.run(PLANTED[name].world_size, judge_sound, name)[0]
    assert {o.verdict for o in outcomes} <= {"equal", "as promised"}, outcomes


def test_nine_of_ten_that_are_wrong_only_on_several_workers_are_found_and_eight_named_rightly():
    several = [mistake for mistake in PLANTED.values() if not mistake.strikes_alone]
    found = [mistake for mistake in several if mistake.misnamed != "-"]
    named = [mistake for mistake in several if not mistake.misnamed]
    assert len(several) >= 24
    assert len(found) >= 0.9 * len(several) and len(named) >= 0.8 * len(several)


def test_the_table_of_the_page_is_that_of_the_code():
    assert as_markdown() in DOCS.read_text()
