"""The certificate of a verification: what was asked, what came out, on what; in a folder and in MLflow."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaleray import metric_names as names
from scaleray.config import RunConfig
from scaleray.data.sources import Source
from scaleray.launch.run_folder import RunFolder
from scaleray.launch.verification_plan import Plan, Question
from scaleray.reproducibility.fingerprint import environment, environment_hash
from scaleray.tracking import store
from scaleray.tracking.store import RunStore
from scaleray.training.job import TRAIN
from scaleray.training.verification import Outcome

Say = Callable[[str], None]


@dataclass(frozen=True)
class Certificate:
    """The answer, readable without the code that gave it."""

    passed: bool
    verdict: str
    workload: str
    config_hash: str
    environment_hash: str
    bound: float
    precision: str
    own_precision: str
    steps: int
    strategies: list[str]
    world_sizes: list[int]
    accumulation: list[int]
    global_batch_size: int
    where: str
    """Ray, or gloo processes."""
    date: str
    duration_s: float
    outcomes: list[Outcome]
    config: dict[str, Any]
    data: dict[str, Any]
    environment: dict[str, Any]
    run_dir: str
    tracking_uri: str
    run_id: str
    mlflow_link: str

    def to_json(self) -> str:
        """As indented JSON; NaN and infinity become null."""
        return json.dumps(_plain(dataclasses.asdict(self)), indent=2)


@contextlib.contextmanager
def recorded(config: RunConfig, tracking_uri: str, started_at: float) -> Iterator[tuple[RunFolder, RunStore]]:
    """A folder and an MLflow run, which ends as FINISHED, FAILED or KILLED with the context."""
    stem = config.workload.name.rpartition(":")[2].lower() or "run"
    name = (
        config.tracking.run_name
        or f"verify-{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{int(started_at * 1000) % 1000:03d}"
    )
    named = config.model_copy(update={"tracking": config.tracking.model_copy(update={"run_name": name})})
    folder = RunFolder.reserve(named)
    status = "FAILED"
    try:
        run = RunStore.create(
            tracking_uri, experiment=config.tracking.experiment, run_name=folder.name, started_at=started_at,
            tags={
                "scaleray.kind": "verify",
                "scaleray.config_hash": config.hash(),
                "scaleray.workload": config.workload.name,
                "mlflow.source.name": config.workload.name,
                "mlflow.source.type": "JOB",
            },
        )  # fmt: skip
        try:
            yield folder, run
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            with contextlib.suppress(Exception):  # a server that has gone since must not hide the result
                run.send({"op": "status", "status": status, "end_time": int(time.time() * 1000)})
    finally:
        folder.complete()
        folder.remove_if_empty()


def make_certificate(
    config: RunConfig, question: Question, plan: Plan, sources: Mapping[str, Source], outcomes: list[Outcome],
    folder: RunFolder, run: RunStore, *, local: bool, started_at: float,
) -> Certificate:  # fmt: skip
    """Put the answer together. outcomes: of every variant, the refused ones included."""
    facts = environment()
    judged = [o for o in outcomes if o.verdict != "refused"]
    bad = [o for o in judged if o.verdict == "differs"]
    reference = plan.reference.job
    return Certificate(
        passed=not bad,
        verdict=_verdict(judged, bad, question),
        workload=config.workload.name,
        config_hash=config.hash(),
        environment_hash=environment_hash({"environment": facts}),
        bound=question.bound,
        precision=question.precision,
        own_precision=config.precision.dtype,
        steps=reference.recipe.total_steps,
        strategies=list(question.strategies),
        world_sizes=sorted(set(question.world_sizes)),
        accumulation=sorted(set(question.accumulation)),
        global_batch_size=reference.recipe.global_batch_size,
        where="gloo processes" if local else "Ray",
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        duration_s=time.time() - started_at,
        outcomes=outcomes,
        config=config.to_dict(),
        data={TRAIN: sources[TRAIN].describe()},
        environment=facts,
        run_dir=folder.path,
        tracking_uri=store.without_password(run.uri),
        run_id=run.run_id,
        mlflow_link=store.run_link(run.uri, run.experiment_id, run.run_id),
    )


def _verdict(judged: list[Outcome], bad: list[Outcome], question: Question) -> str:
    if bad:
        causes = ", ".join(sorted({o.mismatch.cause for o in bad if o.mismatch}))
        return f"not the same training: {len(bad)} of {len(judged)} variants differ ({causes})"
    largest = max((o.comparison.largest for o in judged if o.verdict == "equal"), default=math.nan)
    promised = sum(o.verdict == "as promised" for o in judged)
    more = f"; {promised} that do not promise equality keep what they do promise" if promised else ""
    return f"the same training: {len(judged) - promised} variants equal one process within {question.bound:g}, largest difference {largest:.1e}{more}"


def keep(certificate: Certificate, folder: RunFolder, run: RunStore, render: Any, say: Say) -> None:
    """Write the certificate, and the table that `render` makes of it, to the folder and to MLflow."""
    files = {"certificate.json": certificate.to_json()} | ({"verification.txt": render(certificate)} if render else {})
    for name, text in files.items():
        Path(folder.work_dir, name).write_text(text)
    judged = [o for o in certificate.outcomes if o.verdict == "equal"]
    values = {
        names.VERIFY_LOSS_DIFFERENCE.name: max((o.comparison.loss for o in judged), default=math.nan),
        names.VERIFY_GRAD_NORM_DIFFERENCE.name: max((o.comparison.grad_norm for o in judged), default=math.nan),
        names.VERIFY_PARAMETER_DIFFERENCE.name: max((o.comparison.parameters for o in judged), default=math.nan),
        names.VERIFY_MISMATCHES.name: float(sum(o.verdict == "differs" for o in certificate.outcomes)),
    }
    now = int(time.time() * 1000)
    params = ("config_hash", "environment_hash", "bound", "precision", "own_precision", "steps", "strategies", "world_sizes", "accumulation", "global_batch_size", "where")  # fmt: skip
    operations: list[dict[str, Any]] = [
        {"op": "params", "values": {key: getattr(certificate, key) for key in params}},
        {"op": "metrics", "points": [(k, v, now, 0) for k, v in values.items() if math.isfinite(v)]},
        {"op": "tags", "values": {"scaleray.verdict": certificate.verdict, "scaleray.environment_hash": certificate.environment_hash, "scaleray.passed": str(certificate.passed).lower()}},
        *({"op": "artifact", "path": str(Path(folder.work_dir, name))} for name in files),
    ]  # fmt: skip
    try:
        for operation in operations:
            run.send(operation)
    except Exception as exc:  # mlflow and its drivers share no base class; the result stands in the folder
        say(f"warning: MLflow did not take the certificate ({type(exc).__name__}); it is in {folder.path}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
