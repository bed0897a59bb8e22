"""`doctor`: inspect a cluster or this machine, evaluate the findings, and record them on request."""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleray.clusters.doctor.fleet import this_machine
from scaleray.clusters.doctor.inspection import Inspection, Subject
from scaleray.clusters.preflight.clock_checks import check_clocks
from scaleray.clusters.preflight.machine_checks import machine_checks
from scaleray.clusters.preflight.service_checks import check_mlflow, check_ports, check_storage
from scaleray.clusters.preflight.speed_checks import all_reduce_checks, check_rates, link_checks
from scaleray.clusters.preflight.version_checks import check_drivers, check_nodes, check_packages
from scaleray.common.progress import stage
from scaleray.config import RunConfig, load_config
from scaleray.config.base import absolute_path, without_password
from scaleray.config.checkpoint import CheckpointSettings
from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.config.hardware.measured_collectives import COLUMNS
from scaleray.config.tracking_monitoring_study import TrackingSettings
from scaleray.errors import ClusterError, TrackingError, UsageError, first_line
from scaleray.launch.workers.forks import begin_imports
from scaleray.recording.store import resolve_uri, uri_of_environment
from scaleray.records.doctor_record import AllReduceTime, DoctorRecord, Measured, PreflightCheck


def evaluate(measured: Measured) -> list[PreflightCheck]:
    """Return all checks, in the order in which a user should fix problems."""
    checks = [check_nodes(measured)]
    if any(not node.error for node in measured.nodes):
        checks += [check_packages(measured), check_drivers(measured), *machine_checks(measured)]
    return [
        *checks,
        check_clocks(measured),
        check_ports(measured),
        check_storage(measured),
        check_mlflow(measured),
        check_rates(measured),
        *all_reduce_checks(measured),
        *link_checks(measured),
    ]


def collectives_csv(times: Sequence[AllReduceTime]) -> str:
    """CSV of all-reduces, one line per group size and message size. Equal groups, such as those inside each node, are
    represented by their median: the planner needs the typical time, and another check finds slow groups."""
    groups: dict[tuple[int, int, int], list[float]] = {}
    for took in times:
        groups.setdefault((took.ranks, took.nodes, took.num_bytes), []).append(took.seconds)
    rows = [(*group, statistics.median(found)) for group, found in sorted(groups.items())]
    lines = [",".join(COLUMNS), *(f"{ranks},{nodes},{size},{seconds:.9g}" for ranks, nodes, size, seconds in rows)]
    return "\n".join(lines) + "\n"


HERE = "local"
"""Value of RAY_ADDRESS that does not refer to a cluster."""


def doctor(
    config: RunConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    address: str | None = None,
    local: bool = False,
    storage: str | None = None,
    uri: str | None = None,
    network: str | None = None,
    collectives: str | Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> DoctorRecord:
    """Check every node of a Ray cluster, or this machine, before training there: versions, GPUs, limits, disks, clocks,
    ports, storage, MLflow, and the speed of every GPU and every link. `.checks` of the record has a verdict, finding
    and remedy for each; `.worst` is the worst verdict.

    config: its storage and MLflow are checked; None: an empty config. address: HOST:PORT of the cluster; None: that of
    RAY_ADDRESS or, if unset, this machine. local: this machine, without Ray. storage, uri: replace the config's; if any
    tracking URI is configured, the record is stored in MLflow. network: between nodes, such as 100G, for comparison.
    collectives: file to which to write the all-reduces for `plan`.

    Raises ClusterError if the cluster cannot be reached, UsageError for errors of use.
    """
    if config is not None and not isinstance(config, RunConfig):
        config = load_config(flags=config) if isinstance(config, Mapping) else load_config(config)
    if network is not None:
        CATALOGUE.find_network(network)  # report an invalid one before measuring
    tracking = TrackingSettings() if config is None else config.tracking
    checkpoint = CheckpointSettings() if config is None else config.checkpoint
    said = uri or tracking.uri
    subject = Subject(absolute_path(storage or checkpoint.storage_path), resolve_uri(said), network or "")
    record = _examined(subject, address=address, local=local, say=say)
    if collectives is not None:
        _write_collectives(Path(collectives), record)
    is_tracked = bool(said or uri_of_environment())
    if is_tracked and not record.measured.tracking_error:
        return _kept_in_mlflow(record, subject.tracking_uri, tracking.experiment)
    return record


def _examined(subject: Subject, *, address: str | None, local: bool, say: Callable[[str], None]) -> DoctorRecord:
    started = time.perf_counter()
    if local and address is not None:
        text = "and --local cannot be combined: --local checks only this machine"
        raise ClusterError.problem("--address", text, "omit one of them")
    address = None if local else address or os.environ.get("RAY_ADDRESS")
    if not address or address == HERE:
        begin_imports(("scaleray.clusters.doctor.fleet",))  # while this process makes its own checks
        nodes: Any = this_machine()
    else:
        from scaleray.clusters.doctor.on_ray import ray_nodes

        nodes = ray_nodes(address)
    with nodes as fleet:
        say(f"checking {len(fleet.names)} node{'s' if len(fleet.names) != 1 else ''}")
        measured = Inspection(fleet, subject).everything()
        found = DoctorRecord(checks=evaluate(measured), measured=measured, address=fleet.address)
    return dataclasses.replace(found, duration_s=time.perf_counter() - started)


def _write_collectives(path: Path, record: DoctorRecord) -> None:
    if not record.measured.all_reduces:
        why = record.measured.not_measured.get("links", "they were not measured")
        raise UsageError.problem(
            "--collectives", f"{path} was not written, as there are no all-reduce measurements: {why}"
        )
    try:
        path.write_text(collectives_csv(record.measured.all_reduces))
    except OSError as exc:
        raise UsageError.problem("--collectives", f"{path} cannot be written: {exc.strerror}") from exc


def _kept_in_mlflow(record: DoctorRecord, uri: str, experiment: str) -> DoctorRecord:
    """Store the record, with its all-reduces for `plan`, as artifacts in MLflow; return it with a link to the run."""
    from scaleray.recording.store import RunStore, run_link
    from scaleray.records.mlflow_operations import EndRun, LogArtifact, SetTags

    with stage("writing to MLflow"), tempfile.TemporaryDirectory() as folder:
        name = time.strftime("doctor-%Y%m%d-%H%M%S")
        run = RunStore.create(uri, experiment=experiment, run_name=name, tags={"scaleray.kind": "doctor"})
        kept = dataclasses.replace(record, mlflow_link=run_link(run.uri, run.experiment_id, run.run_id))
        files = {"doctor.json": kept.to_json()}
        if kept.measured.all_reduces:
            files["collectives.csv"] = collectives_csv(kept.measured.all_reduces)
        try:
            for file, content in files.items():
                Path(folder, file).write_text(content)
                run.send(LogArtifact(str(Path(folder, file))))
            run.send(SetTags({"scaleray.verdict": kept.verdict, "scaleray.preflight": kept.worst}))
            run.send(EndRun("FINISHED", int(time.time() * 1000)))
        except Exception as exc:  # mlflow and its drivers share no base class
            raise TrackingError.problem(
                "MLflow", f"at {without_password(uri)} rejected the record: {first_line(exc)}"
            ) from exc
    return kept
