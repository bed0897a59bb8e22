"""Guided sweeps: the grid as cells, what trials measure, what is refused, the words at the end, and a whole one on a cluster."""

import dataclasses
import json
from pathlib import Path

import pytest
from test_sweep_plan import base, plan_of

from scaleray.errors import ConfigError
from scaleray.records.study_record import Conditions
from scaleray.records.sweep_record import SweepRecord
from scaleray.sweeps.grid_comparison import compare_with_grid
from scaleray.sweeps.guided import GuidedTrials, check_guided, make_guide
from scaleray.sweeps.search_space import BATCH_SIZE, RULE
from scaleray.sweeps.sweep_question import question_of
from scaleray.sweeps.trial_records import make_trial
from scaleray.training.noise.statistical_efficiency import ThroughputModel

TARGET = {"stop.at": "val/loss <= 0.1"}
SIZES, RULES = "4..32", "none,sqrt,linear"


def guided_plan(config=None, **options):
    asked = {"batch_sizes": SIZES, "rules": RULES, "guided": True, "guided_share": 0.5, **options}
    plan, _ = plan_of(config or base(**TARGET), **asked)
    return plan


def trained(plan, number, *, missed=False):
    """A trial as a world would have it in which 8 samples a batch are as good as 4, and larger ones worse."""
    settings = plan.candidates[number]
    size, rule = settings[BATCH_SIZE], settings[RULE]
    samples = round(100 * (1 + size / 16) * {"linear": 1.0, "sqrt": 1.2, "none": 1.5}[rule if size != 8 else "linear"])
    speed = ThroughputModel(0.01, 1e-4).samples_per_s(size, micro_size=settings.get("batch.micro_size"))
    points = [(samples, samples / speed, 0.5 if missed else 0.05)]
    return make_trial(
        plan,
        number,
        settings,
        status="target missed" if missed else "target reached",
        points=points,
        value=points[0][2],
        samples=samples,
        seconds=samples / speed,
        samples_per_s=speed,
        noise_scale=16.0,
        noise_interval=(8.0, 32.0),
    )


def record_of(plan, trials, **more):
    conditions = Conditions(config_hash="a", code_hash="b", environment_hash="c", topology_hash="d")
    values = {
        "name": "sweep-x",
        "command": "",
        "config": plan.base.to_dict(),
        "conditions": conditions,
        "metric": plan.metric,
        "direction": "min",
        "target": str(plan.base.stop.at),
        "scheduler": "fifo",
        "search": "grid",
        "trials": trials,
        "started_at": 0.0,
        "duration_s": 1.0,
        "words": ["as before"],
    }
    return SweepRecord(**{**values, **more})


def run_in_world(guided, plan, **world):
    trials = []

    def run_numbers(numbers):
        trials.extend(trained(plan, number, **world) for number in numbers)

    said = []
    guided.run(lambda: trials, run_numbers, said.append)
    return trials, said


def test_theorys_rule_comes_first_and_rules_are_one_training_at_the_reference():
    plan = guided_plan()
    guide = make_guide(plan, share=0.5)
    assert [json.loads(arm)[RULE] for arm in guide.arms] == ["linear", "sqrt", "none"]  # for sgd
    assert guide.reference == 8 and guide.sizes == [4, 8, 16, 32]
    at_reference = {cell.same_as for cell in guide.cells if cell.batch_size == 8}
    elsewhere = {cell.same_as for cell in guide.cells if cell.batch_size == 16}
    assert len(at_reference) == 1 and len(elsewhere) == 3
    assert [cell.batch_size for cell in guide.first_cells()] == [8, 32]
    adam = make_guide(guided_plan(base(**TARGET, **{"optimizer.name": "adamw"})), share=0.5)
    assert json.loads(adam.arms[0])[RULE] == "sqrt"


def test_the_first_trainings_of_one_worker_are_cut_in_two_to_see_their_noise():
    guided = GuidedTrials(guided_plan(), share=0.5)
    plan = guided.measured_plan()
    cut = {c[BATCH_SIZE]: c.get("batch.micro_size") for c in plan.candidates if c[RULE] == "linear"}
    assert cut == {4: None, 8: 4, 16: None, 32: 16}
    assert all(plan.config(c).noise_scale.measure == "auto" for c in plan.candidates)
    assert {plan.config(c).noise_scale.every_steps for c in plan.candidates} == {1}  # 64 steps at most
    two = GuidedTrials(guided_plan(workers_per_trial=2), share=0.5)
    assert all("batch.micro_size" not in c for c in two.measured_plan().candidates)
    assert all(cell.micro_size is None for cell in two.guide.cells)


def test_a_guided_sweep_runs_a_part_of_the_grid_and_says_what_it_chose():
    plan = guided_plan()
    guided = GuidedTrials(plan, share=0.5)
    trials, said = run_in_world(guided, guided.measured_plan())
    assert 2 < len(trials) < len(plan.candidates) / 2
    assert said and all(text.startswith("  goodput is highest at batch") for text in said)
    record = guided.conclude(record_of(plan, trials))
    assert "Guided: batch" in record.words[0] and "rule linear" in record.words[0] and record.words[-1] == "as before"
    assert any("noise scale" in text for text in record.words)
    assert [point.batch_size for point in record.goodput] == [4, 8, 16, 32]
    # the first two were cut in halves, which is slower, and are judged as if they had not been
    whole = {t.number: t.samples_to_target / ThroughputModel(0.01, 1e-4).samples_per_s(t.batch_size) for t in trials}
    assert max(record.trials, key=lambda t: t.goodput).number == min(whole, key=whole.__getitem__)


def test_the_record_of_a_guided_sweep_reads_what_it_wrote(tmp_path):
    plan = guided_plan()
    guided = GuidedTrials(plan, share=0.5)
    trials, _ = run_in_world(guided, guided.measured_plan())
    record = guided.conclude(record_of(plan, trials))
    (tmp_path / "record.json").write_text(record.to_json())
    assert SweepRecord.read(tmp_path / "record.json") == record


def test_a_budget_that_ends_the_search_is_said_with_what_would_have_been_next():
    plan = guided_plan(guided_share=0.01)
    guided = GuidedTrials(plan, share=0.01)
    trials, _ = run_in_world(guided, guided.measured_plan())
    assert len(trials) == 2
    words = guided.conclude(record_of(plan, trials)).words
    assert any("1% of the grid's samples ended the search" in text for text in words)


def test_a_target_that_is_missed_is_the_first_thing_said():
    plan = guided_plan()
    guided = GuidedTrials(plan, share=0.5)
    trials, _ = run_in_world(guided, guided.measured_plan(), missed=True)
    record = guided.conclude(record_of(plan, trials))
    assert len(trials) == 2 and "neither of the first two trainings reached val/loss <= 0.1" in record.words[0]
    assert record.goodput == []


def test_an_interrupted_search_goes_on_with_the_trial_that_it_would_have_run():
    plan = guided_plan()
    guided = GuidedTrials(plan, share=0.5)
    trials, _ = run_in_world(guided, guided.measured_plan())
    order = [trial.number for trial in trials]
    again = GuidedTrials(plan, share=0.5)
    assert again.guide.next_cells(trials[:2])[0].numbers == (order[2],)
    assert again.guide.next_cells(trials) == []


@pytest.mark.parametrize(
    ("flags", "options", "words"),
    [
        ({}, {}, "fastest way to a target"),
        (TARGET, {"scheduler": "asha"}, "stop early"),
        (TARGET, {"search": "optuna", "trials": 3}, "among the trials of a grid"),
        (TARGET, {"guided_share": 0.0}, "above 0"),
        (TARGET, {"learning_rates": "1e-3..1e-2"}, "no grid"),
    ],
)
def test_what_cannot_be_guided_is_refused(flags, options, words):
    config = base(**flags)
    asked = {"batch_sizes": SIZES, "rules": RULES, "guided": True, "guided_share": 0.5, **options}
    with pytest.raises(ConfigError, match=words):
        check_guided(config, question_of(config, **asked))


def test_the_words_say_what_adascale_would_do_at_a_larger_batch():
    plan = guided_plan(rules="linear")
    guided = GuidedTrials(plan, share=1.0)
    trials, _ = run_in_world(guided, guided.measured_plan())
    words = guided.conclude(record_of(plan, trials)).words
    chosen = next(int(text.split()[2]) for text in words if text.startswith("Guided"))
    assert chosen > 8
    # phi = 16 at a reference of 8: (16 / 8 + 1) / (16 / B + 1)
    assert any(f"is worth {3 / (16 / chosen + 1):.2f} of the reference's 8" in text for text in words)


# against the whole grid


def test_a_choice_is_judged_by_the_grids_own_figures():
    plan = guided_plan()
    whole = record_of(plan, [trained(plan, n) for n in range(len(plan.candidates))], name="grid")
    guided = GuidedTrials(plan, share=0.5, against=whole)
    trials, _ = run_in_world(guided, guided.measured_plan())
    found = compare_with_grid(record_of(plan, trials), whole)
    assert found.chosen == found.best and found.loss == 0.0
    assert found.samples_share == sum(t.samples for t in trials) / sum(t.samples for t in whole.trials) < 0.5
    assert "is 0.0% below its best" in guided.conclude(record_of(plan, trials)).words[1]
    slow = record_of(plan, [t for t in trials if t.batch_size != found.best[0]])
    other = compare_with_grid(slow, whole)
    assert other.loss > 0 and other.chosen != other.best


def test_a_folder_without_a_record_is_no_grid(tmp_path):
    from scaleray.sweeps.sweep_folder import grid_record

    with pytest.raises(ConfigError, match="has no record of a sweep"):
        grid_record(str(tmp_path))


def test_sweeps_of_another_training_are_not_compared():
    plan = guided_plan()
    trials = [trained(plan, n) for n in range(len(plan.candidates))]
    ours = record_of(plan, trials)
    for other in (
        record_of(plan, trials, target="val/loss <= 0.2"),
        record_of(plan, trials, conditions=dataclasses.replace(ours.conditions, config_hash="z")),
        record_of(plan, [dataclasses.replace(t, samples_to_target=None) for t in trials]),
        record_of(plan, [t for t in trials if t.batch_size != compare_with_grid(ours, ours).chosen[0]]),
    ):
        with pytest.raises(ConfigError, match="against-grid"):
            compare_with_grid(ours, other)


# on a cluster


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_a_guided_sweep_on_a_cluster_measures_chooses_and_goes_on(ray_session, tmp_path):
    from test_sweep import run

    from scaleray.sweeps.sweep import sweep

    asked = {"batch_sizes": "8,32", "rules": "linear,none", "workers_per_trial": 2, "guided": True, "guided_share": 0.1}
    flags = {"stop.at": "val/loss <= 0.05", "stop.after": "30 epochs"}
    record = run(tmp_path, flags, **asked)
    assert record.words[0].startswith("Guided: batch") and len(record.goodput) == 2
    assert len(record.trials) == 2 and any("ended the search" in text for text in record.words)
    assert all(trial.noise_interval is not None and trial.goodput for trial in record.trials if trial.samples_to_target)
    # without its end and its last trial it is an interrupted sweep
    folder = Path(record.folder)
    (folder / "record.json").unlink()
    last = sorted((folder / "trials").iterdir())[-1]
    last.unlink()
    again = sweep(continue_=str(folder))
    # times differ from run to run, so that the search may end elsewhere; what ran before runs no second time
    kept = {t.number: t.samples_to_target for t in record.trials if f"{t.number:05d}.json" != last.name}
    assert kept.items() <= {t.number: t.samples_to_target for t in again.trials}.items()
    assert again.words[0].startswith("Guided: batch") and len(again.trials) == 2


def test_a_training_that_counts_for_several_rules_is_spent_once_and_changes_no_choice():
    from scaleray.sweeps.same_trainings import SameTrainings

    plan = guided_plan()
    guided = GuidedTrials(plan, share=0.5)
    trials, _ = run_in_world(guided, plan)
    same = SameTrainings(plan)
    more = [*trials, *(other for trial in trials for other in same.counted(trial, trials))]
    assert len(more) == len(trials) + 2  # the other two rules at the reference batch
    guide = guided.guide
    assert guide.spent(more) == guide.spent(trials)
    assert guide.next_cells(more) == guide.next_cells(trials) == []
    outlook = guide.outlook(more)
    assert outlook is not None
    assert [cell.batch_size for cell in guide.cells].count(8) == 3
    once = (
        sum(outlook.samples_of(cell) for cell in guide.cells if cell.batch_size != 8)
        + guide.results(more)[8, guide.arms[0]].spent
    )
    assert guide.grid_samples(outlook) == pytest.approx(once)
    words = guided.conclude(record_of(plan, more)).words[0]
    assert f"{len(trials)} of 10 trials ran" in words


@pytest.mark.parametrize("workers", [1, 2])
def test_the_share_of_the_grid_that_may_be_spent_is_the_one_that_was_asked_for(workers):
    plan = guided_plan(workers_per_trial=workers)
    assert make_guide(plan, share=0.25).share == 0.25
