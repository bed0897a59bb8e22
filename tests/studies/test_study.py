"""Whole studies: what is kept, reused, continued and refused; the workers are stand-ins but in the last tests."""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing
import os
import re
from pathlib import Path

import pytest
from shown_progress import shown

from scaleray.config import load_config
from scaleray.errors import ClusterError, ConfigError, PeerLostError, RunFailedError
from scaleray.launch.workers import gloo
from scaleray.records.study_record import NoiseHistory, Repeat, StudyRecord, ToTarget
from scaleray.studies import hardware as study_places
from scaleray.studies import study as studies
from scaleray.studies.measure_sizes import repeat_order
from scaleray.studies.study_options import StudyOptions

HERE = Path(__file__).parents[1] / "launch"
CPU = [{"cpu": "some", "accelerators": {}, "device": "cpu"}]
SHORT = {"steps": 4, "seconds": 0.0}


def config(tmp_path, workload="Line", **more):
    flags = {
        "workload.name": f"{HERE / 'workloads.py'}:{workload}",
        "batch.global_size": 16,
        "optimizer.learning_rate": 0.05,
        "stop.after": "12 steps",
        "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "checkpoint.storage_path": str(tmp_path / "runs"),
        **more,
    }
    return load_config(flags=flags, environ={})


class Workers:
    """Stand-ins that tell turns of a made-up speed at once. fails_after: raise `error` when so many turns are told."""

    def __init__(self, *, fails_after=None, error=KeyboardInterrupt, hardware=lambda workers: CPU):
        self.fails_after, self.error, self.hardware = fails_after, error, hardware
        self.groups = []  # (workers, missing turns, whether noise is to be measured) of each study_size of a group
        self.told = 0

    def __call__(self, code, path, study_sizes, seed, tell, config, sources):
        study_sizes = copy.deepcopy(study_sizes)  # as other processes have them: what is told changes the driver's
        self.groups.append(
            [(study_size.workers, study_size.num_missing, study_size.needs_noise) for study_size in study_sizes]
        )
        for number, study_size in repeat_order(study_sizes, seed):
            if self.told == self.fails_after:
                raise self.error()
            self.told += 1
            tell(
                (
                    study_size.name,
                    dataclasses.replace(self.turn(study_size), round=number, placement={"local": study_size.workers}),
                )
            )
        for study_size in study_sizes:
            if study_size.needs_target:
                tell((study_size.name, self.target(study_size)))
            if study_size.needs_noise:
                tell((study_size.name, self.noise(study_size)))

    def target(self, study_size):
        return ToTarget(
            is_reached=True, steps=3, samples=48, time_s=1.5, metric="val/loss", value=0.4, curve=[(48, 1.5, 0.4)]
        )

    def noise(self, study_size):
        count = 10 * study_size.workers
        return NoiseHistory(
            scale=40.0,
            interval=(30.0, None),
            way="workers",
            num_measurements=count,
            covers="its first steps",
            curve=[(16, None), (32, 50.0), (16 * count, 40.0)],
        )

    def turn(self, study_size):
        n = study_size.workers
        step = 1e-3 * study_size.job.recipe.per_worker_batch_size + 5e-4 * (n > 1)
        times = [step * (1 + 0.01 * ((7 * self.told + k) % 5)) for k in range(40)]
        return Repeat(
            step_times_s=times,
            input_waits_s=[0.0] * 40,
            input_share=0.0,
            alone_s=step - 5e-4 if n > 1 else None,
            slowest_alone_s=step - 4e-4 if n > 1 else None,
            hardware=self.hardware(n),
            measured_at=1e9 + self.told,
        )


@pytest.fixture
def study(tmp_path, monkeypatch, uri):
    # the page costs a second, and is looked at below
    monkeypatch.setattr("scaleray.studies.study_page.write_study_report", lambda record, folder: [])
    monkeypatch.setattr(study_places.psutil, "cpu_count", lambda *a, **k: 4)

    def run(question=None, workers=None, said=None, *, flags=None, **options):
        monkeypatch.setattr(studies, "measure_in_processes", workers or Workers())
        question = question or StudyOptions(world_sizes=[1, 2, 4], repeats=3)
        say = (lambda text: None) if said is None else said.append
        flags = {"tracking.uri": uri, **(flags or {})}
        return studies.study(config(tmp_path, **flags), options=question, local=True, say=say, **options)

    return run


def points_of(record):
    return {(curve.mode, at.point.workers): at.point for curve in record.curves for at in curve.points}


@pytest.mark.combination
def test_a_study_ends_in_a_record_with_its_curves_verdict_and_place_in_mlflow(study):
    from mlflow import MlflowClient

    flags = {"study.price_per_worker_hour": 2.0, "study.currency": "EUR"}
    record = study(
        StudyOptions(world_sizes=[1, 2, 4], mode="strong,weak", repeats=3), flags=flags, command="scaleray study -c x"
    )
    found = points_of(record)
    assert sorted(found) == [(mode, n) for mode in ("strong", "weak") for n in (1, 2, 4)]
    assert {n: found["weak", n].global_batch_size for n in (1, 2, 4)} == {1: 16, 2: 32, 4: 64}
    assert found["strong", 1].turns == found["weak", 1].turns  # the base was measured once
    assert {tuple(p.rounds) for p in found.values()} == {tuple(f"{record.name}/{number}" for number in range(3))}
    point = found["strong", 4]
    parts = point.compute_s + point.exposed_comm_s + point.input_wait_s + point.other_s
    assert parts == pytest.approx(point.step_time_s.value)
    assert point.cost_per_million_samples == pytest.approx(4 * 2.0 / 3600 * 1e6 / point.samples_per_s.value)
    assert len(record.words) == 3 and record.words[0].startswith("Strong scaling: ")
    # a line of five parameters, said to take milliseconds
    assert record.words[2].startswith("The planner's model is not used as a law: a step on 1 worker is 16")
    assert "8 workers would be the first to span nodes" in record.words[0]  # cpu_count is 4 here
    again = StudyRecord.read(Path(record.folder) / "record.json")
    assert again == record and again.command == "scaleray study -c x"
    client = MlflowClient(record.tracking_uri)
    assert client.get_run(record.run_id).info.status == "FINISHED"
    assert all(client.get_run(p.run_id).data.metrics["point/world_size"] == p.workers for p in found.values())
    assert record.mlflow_link.endswith(record.run_id[:12])


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_study_says_how_many_turns_it_has_taken_and_how_long_the_others_will(study, monkeypatch, is_terminal):
    class Seen(Workers):
        def turn(self, study_size):
            seen.look()
            return super().turn(study_size)

    with shown(monkeypatch, is_terminal=is_terminal) as seen:
        study(workers=Seen())
    assert len(seen.views) == 9 and "left" not in seen.views[0]
    (line,) = [line for line in seen.views[-1].splitlines() if "8 of 9 measurements" in line]
    assert (
        re.search(r"8 of 9 measurements, about 11 min \d+ s left$", line.rstrip())
        and len(line) <= 80
        and ("━" in line) == is_terminal
    )


@pytest.mark.combination
def test_what_was_measured_is_reused_and_named_and_can_be_forced_anew(study):
    from mlflow import MlflowClient

    first = study()
    said, nobody = [], Workers()
    second = study(workers=nobody, said=said)
    assert nobody.groups == []
    assert any("no worker starts" in line for line in said)
    assert any(f"3 measurements reused from {first.name}" in line for line in said)
    assert {p.reused_from for p in points_of(second).values()} == {first.name}
    client = MlflowClient(second.tracking_uri)
    assert all(
        client.get_run(p.run_id).data.metrics["point/world_size"] == p.workers for p in points_of(second).values()
    )
    assert points_of(second)["strong", 2].turns == points_of(first)["strong", 2].turns
    forced = study(StudyOptions(world_sizes=[1, 2, 4], repeats=3, force=True))
    assert {p.reused_from for p in points_of(forced).values()} == {None}


@pytest.mark.combination
def test_a_larger_ladder_measures_only_what_is_new(study):
    study(StudyOptions(world_sizes=[1, 2], repeats=3))
    workers = Workers()
    record = study(StudyOptions(world_sizes=[1, 2, 4], repeats=3), workers)
    assert [size for size, _, _ in workers.groups[0]] == [4]
    assert points_of(record)["strong", 4].reused_from is None


@pytest.mark.combination
@pytest.mark.parametrize(
    ("flags", "is_reused"), [({"batch.micro_size": 2}, False), ({"tracking.every_steps": 3}, True)]
)
def test_other_conditions_are_measured_anew(study, flags, is_reused):
    study()
    workers = Workers()
    study(workers=workers, flags=flags)
    assert (workers.groups == []) == is_reused


@pytest.mark.always("RunningStudy.published")
@pytest.mark.parametrize("moment", ["StoredRepeats.turns", "RunningStudy.published", "ParentRun.log_point"])
def test_a_study_that_is_interrupted_just_after_its_run_was_made_is_marked(study, tmp_path, monkeypatch, moment):
    """The run was RUNNING for ever, and "marked KILLED"."""
    from mlflow import MlflowClient

    from scaleray.launch.session.campaign import ParentRun
    from scaleray.studies.running_study import RunningStudy, StoredRepeats

    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    owner, _, method = moment.partition(".")
    owners = {kind.__name__: kind for kind in (StoredRepeats, RunningStudy, ParentRun)}
    monkeypatch.setattr(owners[owner], method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        study(StudyOptions(world_sizes=[1], repeats=2))
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("scaleray").experiment_id])
    assert run.info.status == "KILLED"


def test_a_study_whose_record_cannot_be_written_is_marked(study, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    from scaleray.launch.session import campaign

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(campaign.Store, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        study(StudyOptions(world_sizes=[1], repeats=2))
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    [run] = [r for r in client.search_runs(["1"]) if r.data.tags["scaleray.kind"] == "scaling-study"]
    assert run.info.status == "FAILED"


@pytest.mark.always("<lambda>-FAILED")
@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, "KILLED"), (lambda: RunFailedError("rank 1 died"), "FAILED")]
)
def test_an_interrupted_study_keeps_what_it_has_and_goes_on_from_there(study, tmp_path, error, status):
    from mlflow import MlflowClient

    said, question = [], StudyOptions(world_sizes=[1, 2, 4], repeats=3)
    with pytest.raises((KeyboardInterrupt, RunFailedError)):
        study(question, Workers(fails_after=5, error=error), said)
    assert any("5 measurements are stored: the same command continues from there" in line for line in said)
    (folder,) = [f for f in (tmp_path / "runs").iterdir() if f.name.startswith("study-")]
    left = StudyRecord.read(folder / "record.json")
    assert sum(len(p.turns) for p in points_of(left).values()) == 5
    assert MlflowClient(left.tracking_uri).get_run(left.run_id).info.status == status
    workers = Workers()
    record = study(question, workers)
    assert workers.told == 9 - 5
    assert all(len(p.turns) == 3 for p in points_of(record).values())
    assert f"{left.name} (2 of 3 measurements)" in {p.reused_from for p in points_of(record).values()}


def test_a_study_that_ends_before_its_first_turn_leaves_no_record(study, tmp_path):
    with pytest.raises(RunFailedError):
        study(workers=Workers(fails_after=0, error=lambda: RunFailedError("no room")))
    assert not list((tmp_path / "runs").glob("study-*/record.json"))


@pytest.mark.combination
def test_each_rung_is_launched_on_its_own_with_relaunch(study):
    workers = Workers()
    record = study(StudyOptions(world_sizes=[1, 2, 4], repeats=2, relaunch=True), workers)
    assert sorted(size for group in workers.groups for size, _, _ in group) == [1, 2, 4]
    assert len(workers.groups) == 3
    assert record.marks == ["relaunched"]
    assert {name for p in points_of(record).values() for name in p.rounds} == {""}
    together = Workers()
    study(StudyOptions(world_sizes=[1, 2, 4], repeats=2), together)
    assert len(together.groups) == 1  # a launch of its own is another measurement, which is not reused


def test_rungs_on_other_machines_are_no_curve(study):
    other = [{**CPU[0], "cpu": "another"}]
    workers = Workers(hardware=lambda n: other if n == 2 else CPU)
    with pytest.raises(ClusterError, match=r"another.*a curve must be measured on the same hardware"):
        study(StudyOptions(world_sizes=[1, 2], repeats=2, relaunch=True), workers)


def test_too_many_workers_for_the_cores_are_refused_or_marked(study):
    with pytest.raises(ClusterError, match="4 cores"):
        study(StudyOptions(world_sizes=[1, 8], repeats=2))
    record = study(StudyOptions(world_sizes=[1, 8], repeats=2, oversubscribe=True))
    assert {n: p.marks for (_, n), p in points_of(record).items()} == {1: [], 8: ["oversubscribed"]}
    assert record.marks == ["oversubscribed"]


def test_sizes_without_a_core_for_each_worker_are_said_and_left_out(study):
    said: list[str] = []
    record = study(StudyOptions(world_sizes=[1, 2, 8], repeats=2), said=said)
    assert {n for _, n in points_of(record)} == {1, 2}
    assert record.words[-1].startswith("Refused: 8 workers, as this machine has 4 cores")
    assert f"  {record.words[-1]}" in said


@pytest.mark.combination
def test_a_training_to_the_target_stands_beside_the_speed(study):
    question = StudyOptions(world_sizes=[1, 2], repeats=2, to_target=True)
    flags = {"stop.at": "val/loss <= 0.5", "evaluation.every": "1 epoch"}
    said: list[str] = []
    record = study(question, said=said, flags=flags)
    assert points_of(record)["strong", 2].to_target.samples == 48
    assert "  2 workers: target reached after 48 samples and 1.5 s" in said
    workers = Workers()
    again = study(question, workers, flags=flags)
    assert workers.groups == [] and points_of(again)["strong", 2].to_target.time_s == 1.5


@pytest.mark.combination
def test_noise_is_kept_reused_and_told_with_its_course(study):
    from mlflow import MlflowClient

    said: list[str] = []
    question = StudyOptions(world_sizes=[1, 2, 4], repeats=2, noise=True)
    record = study(question, said=said)
    found = points_of(record)
    # one worker without accumulation has nothing to compare
    assert {n: p.noise_scale for (_, n), p in found.items()} == {1: None, 2: 40.0, 4: 40.0}
    assert found["strong", 4].noise.interval == (30.0, None)
    assert record.noise == [(32, 50.0), (640, 40.0)]
    assert record.words[1].startswith(
        "Gradient noise scale over its first steps on 4 workers, from the workers' gradients: 40 samples (30 to no bound); "
        "the batch of 16 is well below it"
    )
    assert "  2 workers: gradient noise scale 40 samples (30 to no bound)" in said
    client = MlflowClient(record.tracking_uri)
    for run_id in (record.run_id, found["strong", 4].run_id):
        history = client.get_metric_history(run_id, "train/noise_scale")
        assert [(m.step, m.value) for m in history] == [(32, 50.0), (640, 40.0)]
    workers = Workers()
    again = study(question, workers, said)
    assert workers.groups == [] and again.noise == record.noise
    other = {"noise_scale.measure": "auto", "noise_scale.averaging": 0.9}
    study(question, workers, flags=other)  # measured in another way, but the turns are the same
    assert workers.groups[0] == [(2, 0, True), (4, 0, True)]


def test_noise_that_no_size_can_measure_is_said_to_be_missing(study):
    said: list[str] = []
    record = study(StudyOptions(world_sizes=[1], repeats=2, noise=True), said=said)
    assert any("noise scale: not measured (one worker; no accumulation)" in line for line in said)
    assert record.noise == [] and len(record.words) == 1  # one size needs no law either


@pytest.mark.combination
def test_points_of_another_study_stand_on_the_curve_if_it_is_the_same_measurement(study, tmp_path):
    first = study(StudyOptions(world_sizes=[4], repeats=2))
    record = study(StudyOptions(world_sizes=[1, 2], repeats=2), points_of=[first.folder])
    assert {n: p.reused_from for (_, n), p in points_of(record).items()} == {1: None, 2: None, 4: first.name}
    data = json.loads((Path(first.folder) / "record.json").read_text())
    data["conditions"]["environment_hash"] = "other"
    data["conditions"]["environment"]["python"] = "3.0"
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "record.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"environment: python is .* here, 3\.0 there"):
        study(StudyOptions(world_sizes=[1, 2], repeats=2), points_of=[str(tmp_path / "old")])
    with pytest.raises(ConfigError, match=r"config: batch\.micro_size is 2 here, None there"):
        study(StudyOptions(world_sizes=[1, 2], repeats=2), points_of=[first.folder], flags={"batch.micro_size": 2})
    with pytest.raises(ConfigError, match="--points-of"):
        study(points_of=[str(tmp_path / "nothing")])


@pytest.mark.combination
def test_mfu_is_that_of_the_peak_in_the_config_and_never_more_than_all_of_it(study):
    record = study(flags={"study.peak_tflops": 1e-7})
    point = points_of(record)["strong", 2]
    flops = 2 * 2 * 4  # four multiply-adds forward, as many for the weights' gradient
    assert point.mfu == pytest.approx(point.samples_per_s.value * flops / (2 * 1e5))
    workers = Workers()
    with pytest.raises(RunFailedError, match=r"study\.peak_tflops"):
        study(workers=workers, flags={"study.peak_tflops": 1e-9})
    assert workers.groups == []  # the peak is no condition of the measurement, whose turns are reused


def test_one_size_makes_no_curve_and_says_so(study):
    record = study(StudyOptions(world_sizes=[2], repeats=2))
    (curve,) = record.curves
    assert curve.fits == [] and curve.next_doubling is None and curve.verdict


def test_what_a_worker_raised_itself_is_read_before_what_the_others_heard_of_it():
    failures = {0: (PeerLostError("another worker failed in this measurement"), ""), 1: (RunFailedError("mine"), "")}
    assert str(gloo._first_cause(failures)) == "mine"


def test_a_process_whose_driver_was_killed_ends_without_a_word(monkeypatch):
    monkeypatch.setattr(gloo.signal, "signal", lambda *_: None)
    ours, theirs = multiprocessing.Pipe()
    ours.send((1, 1, 5.0, None))
    ours.send_bytes(gloo.pickled((str, ()), None))
    ours.close()
    gloo._serve(0, 0, gloo.pickled(gloo.UserCode(None, {}, None, "a workload")), theirs, dict(os.environ))


# real workers


def test_a_study_in_gloo_processes_measures_and_reports(tmp_path, uri):

    said: list[str] = []
    question = StudyOptions(world_sizes=[1, 2], repeats=2, **SHORT, oversubscribe=True)
    flags = {"tracking.uri": uri}
    record = studies.study(config(tmp_path, **flags), options=question, local=True, say=said.append)
    found = points_of(record)
    assert {n: p.strategy for (_, n), p in found.items()} == {1: "single", 2: "ddp"}
    assert all(len(p.turns) == 2 for p in found.values())
    assert found["strong", 2].sent_bytes == 5 * 4  # four weights and a bias, in fp32
    assert found["strong", 2].exposed_comm_s is not None
    assert (Path(record.folder) / "report.html").stat().st_size < 2**20
    assert sum("ms a step" in line for line in said) == 4


@pytest.mark.combination
@pytest.mark.timeout(900)
def test_an_error_of_the_workload_ends_the_study_and_is_what_the_user_reads(tmp_path, uri):
    flags = {"tracking.uri": uri, "workload.args.at_call": 2, "workload.args.rank": 0}
    question = StudyOptions(world_sizes=[1], repeats=1, **SHORT)
    with pytest.raises(RunFailedError, match="the user's own mistake"):
        studies.study(config(tmp_path, "Failing", **flags), options=question, local=True)


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_ladder_inside_ray_train_leaves_its_curve_in_mlflow(ray_session, tmp_path, uri):
    from mlflow import MlflowClient

    question = StudyOptions(world_sizes=[1, 2], mode="strong,weak", repeats=1, **SHORT, oversubscribe=True)
    record = studies.study(config(tmp_path, **{"tracking.uri": uri}), options=question)
    found = points_of(record)
    assert sorted(found) == [("strong", 1), ("strong", 2), ("weak", 1), ("weak", 2)]
    assert found["weak", 2].global_batch_size == 32
    assert record.conditions.topology["launch"] == "Ray Train"
    (node,) = record.conditions.topology["placement of workers"]["w002-b16-m8-ddp"].items()
    assert node[1] == 2
    assert MlflowClient(record.tracking_uri).get_run(record.run_id).info.status == "FINISHED"
    assert dataclasses.asdict(record) == dataclasses.asdict(StudyRecord.read(Path(record.folder) / "record.json"))
