"""A sweep under way trains what is the same once, and keeps a record for every name it has. Tune and MLflow are faked."""

from __future__ import annotations

import re

import pytest
from test_sweep_plan import base, plan_of

from scaleray.launch.cluster.connection import Node
from scaleray.launch.session import campaign
from scaleray.launch.session.run_folder import RunFolder
from scaleray.records.settings import settings, trained
from scaleray.records.text.study_sweep_tables import sweep_table
from scaleray.sweeps import running_sweep
from scaleray.sweeps.result import sentences
from scaleray.sweeps.search_space import BATCH_SIZE, RULE
from scaleray.sweeps.sweep_folder import AskedSweep, SweepFolder
from scaleray.sweeps.trial_records import make_trial


class NoMlflow:
    """Knows which trials were logged."""

    run_id, tracking_uri = "r", ""

    def __init__(self):
        self.logged = []

    def log_trial(self, trial):
        self.logged.append(trial.number)

    def identify(self, record):
        return record

    def finish(self, record, **more):
        return ""


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """start(): a sweep of 3 rules at 2 batch sizes in a folder, as often as it is called. trained: numbers, in order."""
    config = base(**{"checkpoint.storage_path": str(tmp_path), "tracking.run_name": "s", "stop.at": "val/loss <= 0.4"})
    plan, _ = plan_of(config, batch_sizes="8,16", rules="none,linear,sqrt", search="grid")
    folder = RunFolder.reserve(config)
    files = SweepFolder(folder)
    asked = AskedSweep(
        config=config.to_dict(),
        question=plan.question,
        candidates=plan.candidates,
        refused=[],
        command="",
        base_dir=None,
        data={},
        started_at=1.0,
        run_id="r",
    )
    ran = []

    def run_experiment(plan, nodes, *, space, on_trial, **more):
        numbers = space["number"]["grid_search"]
        for number in numbers:
            ran.append(number)
            # every training has another result: noise
            points = [(8 * (ran.index(number) + 1), 1.0, 0.3)]
            on_trial(
                make_trial(
                    plan,
                    number,
                    plan.candidates[number],
                    status="target reached",
                    points=points,
                    value=0.3,
                    samples=points[0][0],
                    total_s=2.0,
                    samples_per_s=1.0,
                )
            )
        return set(numbers)

    monkeypatch.setattr(running_sweep, "run_experiment", run_experiment)
    monkeypatch.setattr(campaign.ParentRun, "open", lambda *a, **k: NoMlflow())

    def start(said=None):
        say = said.append if said is not None else lambda text: None
        return running_sweep.RunningSweep(plan, asked, files, [Node("n", {"CPU": 4.0}, {})], "", say, 1.0)

    start.trained, start.plan, start.files = ran, plan, files
    yield start
    folder.unlock()


def by_place(plan, trials):
    return {(plan.candidates[t.number][BATCH_SIZE], plan.candidates[t.number][RULE]): t for t in trials}


def test_rules_at_the_reference_batch_have_one_training_and_a_record_each(sweep):
    said = []
    with sweep(said) as running:
        running.run_all()
        record = running._record()
    assert len(sweep.trained) == 4 and len(record.trials) == 6
    found = by_place(sweep.plan, record.trials)
    at_reference = [found[8, rule] for rule in ("none", "linear", "sqrt")]
    assert len({(t.samples_to_target, t.value) for t in at_reference}) == 1  # no noise between rules
    assert sorted(t.same_as is None for t in at_reference) == [False, False, True]
    assert sorted(running.mlflow.logged) == list(range(6))
    assert sweep.files.read_trials() == record.trials
    assert any("2 of them are the same training as another" in line for line in said)
    places = dict(re.findall(r"trial +(\d+)/\d+ \| batch +(.*) \| seed", "\n".join(said)))
    same = re.findall(r"trial +(\d+)/\d+ .*, the same training as trial (\d+)", "\n".join(said))
    assert len(same) == 2
    for one, other in same:  # all but the rule
        assert re.sub(r"\| \w+ +\|", "|", places[one], count=1) == re.sub(r"\| \w+ +\|", "|", places[other], count=1)


def test_the_table_and_the_sentences_say_which_rules_are_one_training(sweep):
    with sweep() as running:
        running.run_all()
        record = running._record()
    table = sweep_table(record)
    assert table.columns[-1] == "one training with"
    assert {row[0]: row[-1] for row in table.rows if row[1] == "8"} == {
        "linear": "none, sqrt",
        "none": "linear, sqrt",
        "sqrt": "linear, none",
    }
    assert {row[-1] for row in table.rows if row[1] == "16"} == {""}
    words = sentences(record, has_own_target=True, reference_batch_size=8)
    (sentence,) = [word for word in words if "the same training" in word]
    assert "batch 8, learning rate 0.01 (" in sentence and "16" not in sentence
    assert len(trained(record)) == 4


def test_an_interrupted_sweep_counts_what_was_trained_before(sweep):
    with sweep() as running:
        running.run_numbers([n for n, c in enumerate(sweep.plan.candidates) if c[BATCH_SIZE] == 8][:1])
    for trial in sweep.files.read_trials():
        if trial.same_as is not None:  # the sweep ended before these were written
            sweep.files.store.delete(f"trials/{trial.number:05d}.json")
    assert len(sweep.files.read_trials()) == 1
    with sweep() as running:
        running.run_all()
    assert len(sweep.trained) == 4 and len(running.trials) == 6


def test_an_old_folder_in_which_the_same_was_trained_twice_still_opens(sweep):
    plan = sweep.plan
    twice = [n for n, c in enumerate(plan.candidates) if c[BATCH_SIZE] == 8][:2]
    for number in twice:
        sweep.files.write_trial(
            make_trial(
                plan,
                number,
                plan.candidates[number],
                status="target reached",
                points=[(8 * number + 8, 1.0, 0.3)],
                samples=8,
                value=0.3,
            )
        )
    with sweep() as running:
        running.run_all()
        record = running._record()
    assert set(sweep.trained).isdisjoint(twice) and len(sweep.trained) == 3
    assert [record.trials[n].same_as for n in twice] == [None, None]
    third = next(t for t in record.trials if t.batch_size == 8 and t.number not in twice)
    assert third.same_as == twice[0]


@pytest.mark.combination
def test_the_map_marks_what_stands_under_several_rules(sweep):
    from scaleray.sweeps.sweep_figure import sweep_drawings, to_target
    from scaleray.sweeps.sweep_maps import maps

    with sweep() as running:
        running.run_all()
        record = running._record()
    (drawing,) = maps(record)
    assert "white centre: the same training as under another rule" in drawing.caption
    assert "At batch 8 rules give one training, which ran once." in to_target(record, "samples").caption
    assert [s.one_training_with != () for s in settings(record)] == [s.batch_size == 8 for s in settings(record)]
    assert sweep_drawings(record)
