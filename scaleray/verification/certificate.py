"""Certificates of verifications, with request, result and environment, written to a folder and to MLflow."""

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleray.common import metric_names as names
from scaleray.common.callbacks import callbacks_of
from scaleray.common.filesystems import write_whole
from scaleray.common.fingerprint import environment, environment_hash
from scaleray.data import TRAIN
from scaleray.launch.session.opened import own_folder
from scaleray.launch.session.run_folder import RunFolder
from scaleray.recording import store
from scaleray.recording.store import RunStore
from scaleray.records.certificate import DATE, FILE, Certificate, EqualityCertificate, Outcome
from scaleray.records.experiment import CERTIFICATE_SHA256
from scaleray.records.mlflow_operations import EndRun, LogArtifact, LogMetrics, LogParams, Operation, SetTags
from scaleray.records.run_record import Say
from scaleray.records.start import steady_time
from scaleray.verification.preparation import Verification
from scaleray.verification.verification_plan import course
from scaleray.verification.verify_options import VerifyOptions


@contextlib.contextmanager
def recorded(verification: Verification, *, kind: str = "verify") -> Iterator[tuple[RunFolder, RunStore]]:
    """Context with a folder and an MLflow run, which ends as FINISHED, FAILED or KILLED, as the context does."""
    status, config = "FAILED", verification.config
    with own_folder(config, "verify", verification.started_at) as folder:
        run = RunStore.create(
            verification.tracking_uri,
            experiment=config.tracking.experiment,
            run_name=folder.name,
            started_at=verification.started_at,
            tags={
                "scaleray.kind": kind,
                "scaleray.config_hash": config.hash(),
                "scaleray.workload": config.workload.name,
                "mlflow.source.name": config.workload.name,
                "mlflow.source.type": "JOB",
            },
        )
        try:
            yield folder, run
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            with contextlib.suppress(Exception):  # a server that has gone since must not hide the result
                run.send(EndRun(status, int(time.time() * 1000)))


def common_facts(verification: Verification, folder: RunFolder, run: RunStore) -> dict[str, Any]:
    """Fields of a certificate that do not depend on the request."""
    facts, config = environment(), verification.config
    return {
        "workload": config.workload.name,
        "config_hash": config.hash(),
        "config": config.to_dict(),
        "environment": facts,
        "environment_hash": environment_hash({"environment": facts}),
        "where": "gloo processes" if verification.options.local else "Ray",
        "date": time.strftime(DATE),
        "duration_s": steady_time() - verification.started_at,
        "run_dir": folder.path,
        "tracking_uri": store.without_password(run.uri),
        "run_id": run.run_id,
        "mlflow_link": store.run_link(run.uri, run.experiment_id, run.run_id),
    }


def with_reach(verdict: str, passed: bool, workload: Any, steps: int) -> str:
    """The verdict, with a note on its scope if it is good and the workload has callbacks."""
    if not passed or not callbacks_of(workload):
        return verdict
    return f"{verdict}; {steps} steps were compared, and callbacks may act in later steps: see --steps"


def make_certificate(
    verification: Verification, outcomes: list[Outcome], folder: RunFolder, run: RunStore
) -> EqualityCertificate:
    """Assemble the certificate. outcomes: one for each variant, including the refused ones."""
    judged = [o for o in outcomes if o.verdict != "refused"]
    bad = [o for o in judged if o.verdict == "differs"]
    options, reference = verification.options, verification.plan.reference.job
    passed, steps = bool(judged) and not bad, reference.recipe.total_steps
    return EqualityCertificate(
        passed=passed,
        verdict=with_reach(_verdict(judged, bad, options), passed, verification.workload, steps),
        bound=options.allowed,
        precision=options.precision,
        own_precision=verification.config.precision.dtype,
        steps=steps,
        strategies=list(dict.fromkeys(outcome.strategy for outcome in judged)),
        world_sizes=options.sizes,
        accumulation=options.pieces,
        global_batch_size=reference.recipe.global_batch_size,
        outcomes=outcomes,
        data={TRAIN: verification.sources[TRAIN].describe()},
        course=course(verification.plan),
        **common_facts(verification, folder, run),
    )


def _verdict(judged: list[Outcome], bad: list[Outcome], options: VerifyOptions) -> str:
    if not judged:
        return "nothing was compared: no variant could run"
    if bad:
        causes = ", ".join(sorted({o.mismatch.cause for o in bad if o.mismatch}))
        return f"not the same training: {len(bad)} of {len(judged)} variants differ ({causes})"
    if not any(o.verdict == "equal" for o in judged):
        return f"as promised: {len(judged)} variants that do not promise equality keep what they do promise"
    largest = max((o.comparison.largest for o in judged if o.verdict == "equal"), default=math.nan)
    promised = sum(o.verdict == "as promised" for o in judged)
    more = f"; {promised} that do not promise equality keep what they do promise" if promised else ""
    grown = [o.bound for o in judged if o.verdict == "equal" and o.bound is not None and o.bound > options.allowed]
    wider = f" ({len(grown)} within {max(grown):.1e}, since rounding grows in them)" if grown else ""
    return (
        f"the same training: {len(judged) - promised} variants equal one process within {options.allowed:g}{wider}, "
        f"largest difference {largest:.1e}{more}"
    )


def largest_differences(outcomes: list[Outcome]) -> dict[str, float]:
    """Largest differences over all variants that must equal one process, and the number of mismatches, for MLflow."""
    judged = [o.comparison for o in outcomes if o.verdict == "equal"]
    return {
        names.VERIFY_LOSS_DIFFERENCE.name: max((c.loss for c in judged), default=math.nan),
        names.VERIFY_GRAD_NORM_DIFFERENCE.name: max((c.grad_norm for c in judged), default=math.nan),
        names.VERIFY_PARAMETER_DIFFERENCE.name: max((c.parameters for c in judged), default=math.nan),
        names.VERIFY_MISMATCHES.name: float(sum(o.verdict == "differs" for o in outcomes)),
    }


def keep(
    certificate: Certificate,
    folder: RunFolder,
    run: RunStore,
    *,
    params: Sequence[str],
    say: Say,
    metrics: Mapping[str, float] | None = None,
    more_files: Mapping[str, str] | None = None,
) -> None:
    """Write the certificate to the folder and to MLflow. params: names of the fields that become params of the run."""
    files = {FILE: certificate.to_json(), **(more_files or {})}
    for name, text in files.items():
        write_whole(Path(folder.work_dir, name), text)
    now = int(time.time() * 1000)
    tags = {
        "scaleray.verdict": certificate.verdict,
        "scaleray.environment_hash": certificate.environment_hash,
        "scaleray.passed": str(certificate.passed).lower(),
        CERTIFICATE_SHA256: hashlib.sha256(files[FILE].encode()).hexdigest(),
    }
    operations: list[Operation] = [
        LogParams({key: getattr(certificate, key) for key in params}),
        LogMetrics([(k, v, now, 0) for k, v in (metrics or {}).items() if math.isfinite(v)]),
        SetTags(tags),
        *(LogArtifact(str(Path(folder.work_dir, name))) for name in files),
    ]
    try:
        for operation in operations:
            run.send(operation)
    except Exception as exc:  # mlflow and its drivers share no base class; the result stands in the folder
        say(f"warning: MLflow rejected the certificate ({type(exc).__name__}); it is in {folder.path}")
