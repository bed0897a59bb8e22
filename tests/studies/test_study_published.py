"""A study while it goes on: Prometheus finds what it has measured, and it is judged as a run is."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_study import Workers, study

from scaleray.errors import ConfigError
from scaleray.records.alert_record import parse_alerts
from scaleray.records.published import RankSample
from scaleray.studies.study_options import StudyOptions

__all__ = ["study"]


class Watched(Workers):
    """Stand-ins in whose last turn somebody looks at the study's page. said: what the study says, the page among it."""

    def __init__(self, said):
        super().__init__()
        self.said, self.page = said, {}

    def __call__(self, code, path, study_sizes, seed, tell, config, sources):
        super().__call__(code, path, study_sizes, seed, tell, config, sources)
        for rank in (0, 1):
            tell(
                (
                    study_sizes[0].name,
                    RankSample(rank, "here", 2, 9, 1.0, 0.1, memory={"used": 98}, memory_limit_bytes=100),
                )
            )
        (url,) = [line.split()[-1] for line in self.said if "metrics for Prometheus" in line]
        with urllib.request.urlopen(url, timeout=30) as answer:
            for family in text_string_to_metric_families(answer.read().decode()):
                self.page[family.name] = family.samples


@pytest.mark.combination
def test_prometheus_finds_the_points_of_a_study_that_goes_on_and_how_its_workers_do(study, tmp_path):
    said = []
    workers = Watched(said)
    record = study(StudyOptions(world_sizes=[1, 2], repeats=2), workers, said, flags={"monitoring.port": 0})
    points = {at.point.workers: at.point.samples_per_s.value for curve in record.curves for at in curve.points}
    shown = {int(s.labels["workers"]): s.value for s in workers.page["ray_scaleray_point_samples_per_second"]}
    assert shown == pytest.approx(points) and len(points) == 2
    assert {s.labels["ray_train_run_name"] for samples in workers.page.values() for s in samples} == {record.name}
    (done,), (planned,) = workers.page["ray_scaleray_measured"], workers.page["ray_scaleray_measured_planned"]
    assert (done.value, planned.value, done.labels["kind"]) == (4, 4, "study")
    assert {s.labels["rank"] for s in workers.page["ray_scaleray_memory_bytes"]} == {"0", "1"}
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(next(line.split()[-1] for line in said if "http" in line), timeout=30)


class Early(Watched):
    """Stand-ins at whose page somebody looks after the first turns of both sizes, of which more are to come."""

    def __call__(self, code, path, study_sizes, seed, tell, config, sources):
        told = []
        Workers.__call__(self, code, path, study_sizes, seed, told.append, config, sources)
        (url,) = [line.split()[-1] for line in self.said if "metrics for Prometheus" in line]
        for number, result in enumerate(told):
            tell(result)
            if number == 1:
                with urllib.request.urlopen(url, timeout=30) as answer:
                    for family in text_string_to_metric_families(answer.read().decode()):
                        self.page[family.name] = family.samples


@pytest.mark.combination
def test_points_are_there_from_their_first_turn_on_as_those_of_all_sizes_take_turns(study):
    said = []
    workers = Early(said)
    record = study(StudyOptions(world_sizes=[1, 2], repeats=2), workers, said, flags={"monitoring.port": 0})
    (done,) = workers.page["ray_scaleray_measured"]
    times = {int(s.labels["workers"]): s.value for s in workers.page["ray_scaleray_point_step_time_seconds"]}
    whole = {at.point.workers: at.point.step_time_s.value for curve in record.curves for at in curve.points}
    assert done.value == 2 and set(times) == {1, 2}
    assert times == pytest.approx(whole, rel=0.2)


def test_a_study_that_fails_says_so_to_its_alert_command(study, tmp_path):
    heard = tmp_path / "heard"
    command = ["sh", "-c", f"cat >> {heard}"]
    flags = {"alerts.command": command, "alerts.least": "critical"}
    with pytest.raises(KeyError):
        study(workers=Workers(fails_after=1, error=lambda: KeyError("x")), flags=flags)
    (alert,) = json.loads(heard.read_text())["alerts"]
    assert alert["labels"]["rule"] == "run_failed" and alert["labels"]["ray_train_run_name"].startswith("study-")
    (folder,) = (tmp_path / "runs").glob("study-*")
    assert [one.name for one in parse_alerts((folder / "alerts.jsonl").read_text())] == ["run_failed"]


def test_a_port_in_use_is_refused_before_a_study_begins(study, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="another program listens"):
        study(flags={"monitoring.port": other.getsockname()[1]})
    assert not list((tmp_path / "runs").glob("study-*"))
