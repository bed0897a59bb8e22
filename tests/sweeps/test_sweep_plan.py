"""What a sweep decides before anything starts: trials' configs, refusals, room on the cluster, files, and Tune's own settings."""

import json
import math

import pytest
from workloads import Line

from scaleray.config import load_config
from scaleray.data import as_source
from scaleray.errors import ClusterError, ConfigError, DataError
from scaleray.launch.cluster.capacity import check_option_fits, num_concurrent
from scaleray.launch.cluster.connection import Node
from scaleray.launch.session.run_folder import RunFolder
from scaleray.sweeps.search_space import BATCH_SIZE, LEARNING_RATE, RULE, LogUniform
from scaleray.sweeps.sweep_folder import AskedSweep, SweepFolder, finished_record, read_asked
from scaleray.sweeps.sweep_plan import all_args, check_question, make_material, make_plan, material_key
from scaleray.sweeps.sweep_question import question_of
from scaleray.sweeps.trial_records import make_trial, trial_line

FLAGS = {
    "workload.name": "workloads:Line", "batch.global_size": 8, "optimizer.name": "sgd", "optimizer.learning_rate": 0.01,
    "stop.after": "4 epochs", "evaluation.every": "1 epoch",
}  # fmt: skip


def base(**more):
    return load_config(flags={**FLAGS, **more}, environ={})


def plan_of(config=None, workload=None, **options):
    config = config or base()
    workload = workload or Line()
    sources = {name: as_source(value, split=name) for name, value in workload.datasets().items()}
    materials = {material_key(config.workload.args): make_material(workload, sources)}
    question = question_of(config, **options)
    check_question(config, question)
    return make_plan(config, question, materials)


def test_a_trial_is_the_config_with_its_settings_and_without_files_of_its_own():
    config = base(**{"checkpoint.every": "1 epoch", "checkpoint.best": "val/loss min", "workload.args": {"rows": 64}})
    plan, _ = plan_of(config, batch_sizes="16", workers_per_trial=2, vary=("workload.args.rows=64",))
    job = plan.job(plan.candidates[0])
    assert job.config.batch.global_size == 16 and job.config.scale.workers == 2
    assert job.config.optimizer.reference_batch_size == 8  # the batch of the base, where its rate was tuned
    assert job.config.checkpoint.every is None and not job.config.checkpoint.save_final
    assert job.config.workload.args == {"rows": 64}
    assert job.recipe.total_steps == 16


def test_rules_carry_the_learning_rate_from_the_base_of_the_sweep():
    plan, _ = plan_of(batch_sizes="8..32", rules="linear,sqrt,none", search="grid")
    rates = {(c[BATCH_SIZE], c[RULE]): plan.job(c).recipe.learning_rate for c in plan.candidates}
    assert rates[32, "linear"] == pytest.approx(0.04)
    assert rates[32, "sqrt"] == pytest.approx(0.02)
    assert rates[32, "none"] == rates[8, "linear"] == 0.01


def test_what_cannot_run_is_kept_with_its_reason():
    plan, candidates = plan_of(batch_sizes="8..256", rules="none,adam", optimizers="adamw", search="grid")
    reasons = {(s[BATCH_SIZE], s[RULE]): reason for s, reason in candidates.refused}
    assert set(reasons) == {(128, "none"), (256, "none"), (128, "adam"), (256, "adam")}
    assert "the training data has 64 samples" in reasons[128, "none"]
    assert len(plan.candidates) == candidates.num_possible == 8


def test_the_metric_is_the_targets_or_the_first_splits_loss():
    assert plan_of()[0].metric == "val/loss" and plan_of()[0].direction == "min"
    with_target, _ = plan_of(base(**{"stop.at": "val/accuracy >= 0.9"}))
    assert (with_target.metric, with_target.direction) == ("val/accuracy", "max")
    named, _ = plan_of(metric="val/r2 max")
    assert (named.metric, named.direction) == ("val/r2", "max")


class TrainOnly(Line):
    def datasets(self):
        return {"train": super().datasets()["train"]}


@pytest.mark.parametrize(
    ("flags", "options", "message"),
    [
        ({}, {"metric": "loss min"}, "it must be a metric and min or max"),
        ({}, {"metric": "val/loss"}, "it must be a metric and min or max"),
        ({}, {"metric": "test/loss min"}, "no evaluation measures it"),
        ({"evaluation.test": "at_end"}, {"metric": "test/loss min"}, "no evaluation measures it"),
        ({}, {"batch_sizes": "16,24,33", "workers_per_trial": 2}, "2 workers per trial need a multiple of 2"),
        ({}, {"batch_sizes": "16..64", "workers_per_trial": 3}, "3 workers per trial need a multiple of 3"),
        ({}, {"batch_sizes": "128..512"}, "none of which can run: the training data has 64 samples"),
        ({"evaluation.every": None}, {"scheduler": "asha"}, "which requires evaluation.every"),
        ({}, {"scheduler": "pbt", "batch_sizes": "8,16", "learning_rates": "0.1,0.2"}, "may differ only in learning rate"),
        ({}, {"scheduler": "pbt"}, "pbt needs at least two trials"),
        ({}, {"scheduler": "pbt", "search": "optuna", "trials": 4}, "does not accept suggestions"),
    ],
)  # fmt: skip
def test_a_sweep_that_cannot_be_is_one_error(flags, options, message):
    with pytest.raises(ConfigError) as caught:
        plan_of(base(**flags), **options)
    assert message in str(caught.value)


def test_a_workload_without_an_evaluation_is_refused():
    with pytest.raises(DataError, match="only the split 'train'"):
        plan_of(workload=TrainOnly())


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ("optimizer.wait_decay=0,1", "did you mean optimizer.weight_decay"),
        ("optimizer.weight_decay=0,-1", "optimizer.weight_decay is -1"),
        ("optimizer.momentum=0.9,fast", "optimizer.momentum is fast"),
    ],
)
def test_keys_and_values_that_are_varied_are_checked_before_data_is_loaded(vary, message):
    with pytest.raises(ConfigError) as caught:
        check_question(base(), question_of(base(), vary=(vary,)))
    assert message in str(caught.value)


def test_every_combination_of_the_workloads_arguments_is_known():
    config = base(**{"workload.args": {"rows": 64, "kind": "a"}})
    question = question_of(
        config, vary=("workload.args.rows=32,64", "workload.args.size=1,2", "optimizer.momentum=0,0.9")
    )
    found = all_args(config, question.space)
    assert [(a["rows"], a["kind"], a["size"]) for a in found] == [
        (32, "a", 1),
        (32, "a", 2),
        (64, "a", 1),
        (64, "a", 2),
    ]
    assert all_args(config, question_of(config).space) == [{"rows": 64, "kind": "a"}]


def test_lengths_in_samples_are_those_that_the_plan_counts():
    plan, _ = plan_of(base(**{"stop.after": "7 steps", "evaluation.every": "3 steps"}), batch_sizes="24")
    steps = plan.job(plan.candidates[0]).train_plan()
    total, first, evaluations = plan.samples(plan.candidates[0])
    assert total == sum(steps.num_rows(n) for n in range(7)) == 24 + 24 + 16 + 24 + 24 + 16 + 24
    assert first == 24 + 24 + 16
    assert evaluations == 3


def node(cpus, gpus=0, **labels):
    return Node("n", {"CPU": cpus, "GPU": gpus}, labels)


@pytest.mark.parametrize(
    ("nodes", "flags", "expected"),
    [
        ([node(3)], {}, 2),  # one CPU stays free for whoever reads data
        ([node(2)], {"data.reserved_cpus": 0}, 2),
        ([node(9)], {"scale.workers": 2}, 4),
        ([node(9)], {"scale.workers": 3, "scale.cpus_per_worker": 2}, 1),
        ([node(3), node(3)], {"scale.workers": 2, "data.reserved_cpus": 0}, 3),
        ([node(3), node(3)], {"scale.workers": 2, "data.reserved_cpus": 0, "scale.placement": "STRICT_PACK"}, 2),
        ([node(3), node(3)], {"scale.workers": 2, "data.reserved_cpus": 0, "scale.placement": "STRICT_SPREAD"}, 3),
        ([node(4), node(1)], {"scale.workers": 2, "data.reserved_cpus": 0, "scale.placement": "STRICT_SPREAD"}, 1),
        ([node(16, 4)], {"scale.workers": 2, "scale.gpus_per_worker": 1}, 2),
        ([node(16, 1)], {"scale.gpus_per_worker": 0.25}, 4),
        ([node(8, zone="a"), node(8)], {"scale.label_selector": {"zone": "a"}}, 8),
    ],
)
def test_as_many_trials_at_a_time_as_the_cluster_has_room_for(nodes, flags, expected):
    assert num_concurrent(base(**flags), nodes) == expected
    check_option_fits("--workers-per-trial", base(**flags), nodes)


def test_a_trial_that_can_never_fit_says_what_is_missing():
    with pytest.raises(ClusterError) as caught:
        check_option_fits("--workers-per-trial", base(**{"scale.workers": 4}), [node(3)])
    text = str(caught.value)
    assert "--workers-per-trial is 4, which needs 4 workers of 1 CPU" in text
    assert "3 CPUs" in text and "use --workers-per-trial 2" in text


def finished(plan, number=0, **more):
    values = {"status": "target missed", "points": [(16, 1.0, 0.5)], "value": 0.5, "samples": 16, "seconds": 1.0}
    return make_trial(plan, number, plan.candidates[number], **{**values, **more})


def test_a_trials_record_has_what_it_reached_and_when():
    plan, _ = plan_of(base(**{"stop.at": "val/loss <= 0.4"}), batch_sizes="16", rules="linear")
    points = [(16, 1.0, 0.5), (32, 2.0, 0.4), (48, 3.0, 0.2)]
    reached = finished(plan, points=points, status="target reached", value=0.2)
    assert (reached.samples_to_target, reached.time_to_target_s) == (32, 2.0)
    assert (reached.batch_size, reached.learning_rate, reached.rule) == (16, 0.02, "linear")
    assert finished(plan).samples_to_target is None
    assert finished(plan, value=math.nan).value is None
    assert "val/loss 0.5 | 16 samples | 1 s | target missed" in trial_line(finished(plan), 1, 4)


def test_files_of_a_sweep_come_back_as_they_were(tmp_path):
    config = base(**{"checkpoint.storage_path": str(tmp_path), "tracking.run_name": "s"})
    options = {
        "learning_rates": "1e-3..1e-1",
        "rules": "sqrt,none",
        "trials": 3,
        "vary": ("optimizer.betas=[0.9, 0.99]",),
    }
    plan, _ = plan_of(config, **options)
    folder = RunFolder.reserve(config)
    files = SweepFolder(folder)
    asked = AskedSweep(
        config=config.to_dict(),
        question=plan.question,
        candidates=plan.candidates,
        refused=[({"a": 1}, "no")],
        command="scaleray sweep",
        base_dir=None,
        data={"{}": "abc"},
        started_at=1.5,
        run_id="r",
    )
    files.write_asked(asked)
    trial = finished(plan, 1)
    files.write_trial(trial)
    again = read_asked(folder.path)
    assert again == asked
    assert isinstance(again.question.space.learning_rates, LogUniform)
    assert files.read_trials() == [trial]
    assert finished_record(folder.path) is None
    folder.unlock()


def test_a_folder_that_is_no_sweeps_or_is_damaged_is_one_error(tmp_path):
    config = base(**{"checkpoint.storage_path": str(tmp_path), "tracking.run_name": "s"})
    folder = RunFolder.reserve(config)
    files = SweepFolder(folder)
    with pytest.raises(ConfigError, match=r"has no sweep\.json"):
        read_asked(folder.path)
    files.store.write_text("sweep.json", "{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_asked(folder.path)
    files.store.write_text("sweep.json", json.dumps({"format": 9}))
    with pytest.raises(ConfigError, match="was written by another version of scaleray"):
        read_asked(folder.path)
    files.store.write_text("sweep.json", json.dumps({"format": 1, "question": {}}))
    with pytest.raises(ConfigError, match="not written by a sweep"):
        read_asked(folder.path)
    files.store.write_text("trials/00003.json", '{"number": 3')
    with pytest.raises(ConfigError, match="remove the file to run this trial again"):
        files.read_trials()
    folder.unlock()


@pytest.mark.parametrize("scheduler", ["fifo", "asha", "hyperband", "median", "pbt"])
def test_every_scheduler_counts_what_only_grows(scheduler):
    from scaleray.sweeps.schedulers import make_scheduler
    from scaleray.sweeps.trial import EVALUATION, SAMPLES

    plan, _ = plan_of(scheduler=scheduler, learning_rates="0.1,0.2")
    made = make_scheduler(plan, plan.candidates)
    assert getattr(made, "_time_attr", SAMPLES) in (SAMPLES, EVALUATION)


def test_asha_stops_the_worse_of_trials_at_the_same_number_of_samples():
    from scaleray.sweeps.schedulers import make_scheduler

    plan, _ = plan_of(scheduler="asha", batch_sizes="8,32", search="grid")
    scheduler = make_scheduler(plan, plan.candidates)
    scheduler.set_search_properties("value", "min")

    class Trial:
        def __init__(self, name):
            self.trial_id = name

    verdicts = []
    for number, value in enumerate([1.0, 2.0, 3.0, 0.5]):
        trial = Trial(str(number))
        scheduler.on_trial_add(None, trial)
        verdicts.append(scheduler.on_trial_result(None, trial, {"samples": 64, "value": value}))
    assert verdicts == ["CONTINUE", "STOP", "STOP", "CONTINUE"]


def searcher_of(plan, **more):
    pytest.importorskip("optuna")
    from scaleray.sweeps.optuna_search import OptunaSearcher

    return OptunaSearcher(plan, **{"num_trials": 6, "first_number": 0, **more})


def test_optuna_suggests_what_can_run_and_hears_the_mean_of_the_seeds():
    plan, _ = plan_of(batch_sizes="8..256", learning_rates="1e-3..1e-1", search="optuna", trials=6, seeds=2)
    searcher = searcher_of(plan)
    numbers, sizes = [], []
    while (config := searcher.suggest(f"t{len(numbers)}")) != searcher.FINISHED:
        settings = json.loads(config["settings"])
        numbers.append(config["number"])
        sizes.append(settings[BATCH_SIZE])
        assert plan.refuse(settings) is None and 1e-3 <= settings[LEARNING_RATE] <= 1e-1
        searcher.on_trial_complete(f"t{len(numbers) - 1}", {"value": float(len(numbers))})
    assert numbers == list(range(12))
    assert sizes[::2] == sizes[1::2]  # both seeds of a combination
    told = [t.value for t in searcher.study.trials if t.value is not None]
    assert told == [1.5, 3.5, 5.5, 7.5, 9.5, 11.5]
    assert all(reason.startswith("the training data") for _, reason in searcher.refused.values())


def test_optuna_learns_from_trials_that_are_done_and_from_failures():
    plan, _ = plan_of(batch_sizes="8,16", learning_rates="0.01,0.1", search="optuna", trials=6)
    known = [({**c, "optimizer.name": "sgd"}, 0.5) for c in plan.candidates[:2]] + [(plan.candidates[2], None)]
    searcher = searcher_of(plan, known=known)
    states = [t.state.name for t in searcher.study.trials]
    assert states == ["COMPLETE", "COMPLETE", "FAIL"]
    searcher.suggest("a")
    assert searcher.has_running
    searcher.on_trial_complete("a", error=True)
    assert not searcher.has_running
    assert searcher.study.trials[-1].state.name == "FAIL"


def test_a_search_without_optuna_says_how_to_get_it(monkeypatch):
    import sys

    from scaleray.sweeps.optuna_search import import_optuna

    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[search\]"):
        import_optuna()


def test_data_of_many_arguments_has_a_material_each():
    small, large = Line(32), Line(64)
    config = base(**{"workload.args": {"rows": 64}})
    materials = {}
    for rows, workload in ((32, small), (64, large)):
        sources = {name: as_source(value, split=name) for name, value in workload.datasets().items()}
        materials[material_key({"rows": rows})] = make_material(workload, sources)
    question = question_of(config, vary=("workload.args.rows=32,64",), batch_sizes="64")
    plan, candidates = make_plan(config, question, materials)
    assert [c["workload.args.rows"] for c in plan.candidates] == [64]
    assert [s["workload.args.rows"] for s, _ in candidates.refused] == [32]


def shared_plan(flags=None, **options):
    from scaleray.sweeps.same_trainings import SameTrainings

    plan, _ = plan_of(base(**(flags or {})), **options)
    return plan, SameTrainings(plan)


def trained_with(plan, numbers):
    """What is said of each group of trials that are one training."""
    return {
        tuple(sorted((plan.candidates[n][BATCH_SIZE], plan.candidates[n][RULE]) for n in group)) for group in numbers
    }


def test_rules_at_the_reference_batch_are_trained_once_and_counted_for_each_seed():
    plan, same = shared_plan(batch_sizes="4,8,16", rules="none,linear,sqrt", search="grid", seeds=2)
    assert trained_with(plan, map(tuple, same.groups.values())) == {((8, "linear"), (8, "none"), (8, "sqrt"))}
    numbers = same.to_train(range(len(plan.candidates)), [])
    assert len(plan.candidates) == 18 and len(numbers) == 14 and same.num_shared == 4
    seeds = [plan.candidates[n]["seed"] for n in numbers if plan.candidates[n][BATCH_SIZE] == 8]
    assert sorted(seeds) == [0, 1]  # seeds are never one training


def test_the_record_of_another_name_has_the_figures_and_no_time_of_workers():
    plan, same = shared_plan(batch_sizes="8", rules="none,linear,sqrt", search="grid")
    first = finished(plan, 1, total_s=2.0)
    counted = same.counted(first, [])
    assert [t.number for t in counted] == [0, 2] and {t.same_as for t in counted} == {1}
    for trial in counted:
        assert trial.rule == plan.candidates[trial.number][RULE] == trial.settings[RULE] != first.rule
        assert (trial.value, trial.curve, trial.samples, trial.status) == (0.5, first.curve, 16, "target missed")
        assert (trial.total_time_s, trial.run_id) == (0.0, "")
        assert same.counted(trial, [first]) == []
        assert "the same training as trial 2" in trial_line(trial, 1, 3)
        assert "the same training as trial 3" in trial_line(trial, 1, 3, same_as=3)
    # an interrupted sweep goes on: what is recorded is neither trained nor counted again
    assert same.counted(first, counted[:1]) == counted[1:]
    assert same.to_train([0, 2], [first]) == []


@pytest.mark.parametrize(
    ("flags", "options", "num_trainings"),
    [
        ({}, {"warmups": "1 epochs,8 steps,64 samples", "batch_sizes": "8"}, 1),  # of 8 steps an epoch
        ({"schedule.name": "cosine"}, {"warmups": "1 epochs,9 steps", "batch_sizes": "8"}, 2),
        ({}, {"batch_sizes": "32", "rules": "none,linear,sqrt", "learning_rates": "0.01,0.02,0.04"}, 5),  # 0.01 to 0.16 doubling
        ({}, {"batch_sizes": "16", "rules": "sqrt,adam"}, 1),  # sgd has no betas
        ({"optimizer.name": "adamw"}, {"batch_sizes": "16", "rules": "sqrt,adam"}, 2),
        ({}, {"batch_sizes": "8", "rules": "linear,sqrt", "vary": ("optimizer.momentum=0.9,0.5",)}, 2),
        ({}, {"batch_sizes": "16", "rules": "sqrt,legw"}, 1),  # without a warm-up
        ({}, {"batch_sizes": "16", "rules": "sqrt,legw", "warmups": "1 epochs"}, 2),
    ],
)  # fmt: skip
def test_settings_that_come_to_the_same_training_are_trained_once(flags, options, num_trainings):
    plan, same = shared_plan(flags, search="grid", **options)
    assert len(same.to_train(range(len(plan.candidates)), [])) == num_trainings


class OwnOptimizer(Line):
    def optimizer(self, model, settings):
        raise NotImplementedError


def test_a_workload_with_an_optimizer_of_its_own_may_use_the_betas():
    from scaleray.sweeps.same_trainings import SameTrainings

    plan, _ = plan_of(workload=OwnOptimizer(), batch_sizes="16", rules="sqrt,adam", search="grid")
    assert SameTrainings(plan).num_shared == 0


def test_optuna_hears_the_value_of_a_training_that_is_known_and_it_takes_no_trial():
    plan, _ = plan_of(batch_sizes="8,16", rules="none,linear", search="optuna", trials=4)
    searcher = searcher_of(plan, num_trials=4)
    trained = []
    while (config := searcher.suggest(f"t{len(trained)}")) != searcher.FINISHED:
        settings = json.loads(config["settings"])
        trained.append((settings[BATCH_SIZE], plan.job(settings).recipe.learning_rate))
        searcher.on_trial_complete(f"t{len(trained) - 1}", {"value": float(settings[BATCH_SIZE])})
    assert sorted(trained) == [(8, 0.01), (16, 0.01), (16, 0.02)]  # three trainings, each once
    assert [settings[BATCH_SIZE] for settings in searcher.same] == [8]
    of_eight = {t.value for t in searcher.study.trials if t.params.get(BATCH_SIZE) == 0}
    assert of_eight == {8.0}
    assert searcher.left == 1 and not searcher.has_running


def test_a_suggestion_whose_training_runs_already_waits_for_it():
    plan, _ = plan_of(batch_sizes="8", rules="none,linear", search="optuna", trials=2)
    searcher = searcher_of(plan, num_trials=2)
    searcher.suggest("a")
    assert searcher.suggest("b") == searcher.FINISHED
    assert {t.state.name for t in searcher.study.trials} == {"RUNNING"}
    searcher.on_trial_complete("a", {"value": 3.0})
    assert {(t.state.name, t.value) for t in searcher.study.trials} == {("COMPLETE", 3.0)}


def test_optuna_runs_no_training_again_that_an_interrupted_sweep_has_done():
    plan, _ = plan_of(batch_sizes="8,16", rules="none,linear", search="optuna", trials=4, seeds=2)
    known = [({**c, RULE: "none"}, 2.0 + c["seed"]) for c in plan.candidates if (c[BATCH_SIZE], c[RULE]) == (8, "none")]
    searcher = searcher_of(plan, num_trials=4, known=known)
    trained = []
    while (config := searcher.suggest(f"t{len(trained)}")) != searcher.FINISHED:
        trained.append(json.loads(config["settings"])[BATCH_SIZE])
        searcher.on_trial_complete(f"t{len(trained) - 1}", {"value": 9.0})
    assert trained == [16] * 4
    told = [t.value for t in searcher.study.trials if t.params[BATCH_SIZE] == 0 and t.params[RULE] == 1]
    assert set(told) == {2.5}  # the mean of the seeds
    assert {s[RULE] for s in searcher.same} == {"linear"}
