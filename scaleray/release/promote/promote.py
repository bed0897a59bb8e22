"""Promotion of a trained model: gates, a folder with its provenance, a version, and an alias.

The alias moves last, so an interrupted promotion has no effect. A promotion's id depends on the model and the evidence,
so the same command finds the existing version and continues from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleray.common.filesystems import write_whole
from scaleray.common.options import takes
from scaleray.common.own_folder import cache_folder, user_or_somebody
from scaleray.common.progress import stage
from scaleray.errors import CheckpointError, TrackingError, UsageError
from scaleray.models.fetched import MODEL
from scaleray.models.load import find_parts
from scaleray.models.model_options import ModelChoice
from scaleray.models.packed import pack
from scaleray.models.registry import (
    MODEL_URI,
    PROMOTION_TAG,
    STATEMENT_TAG,
    ModelRegistry,
    Named,
    check_alias,
    last_given,
)
from scaleray.models.trained_run import trained_of
from scaleray.recording.find_record import FoundRun
from scaleray.records.gates import GateRecord
from scaleray.records.promotion import Promotion
from scaleray.records.run_record import RunRecord, Say
from scaleray.records.statement import GATES_FILE, digests, write_statement
from scaleray.release.gate.evidence import collect, training
from scaleray.release.gate.gate import evaluate_evidence
from scaleray.release.gate.policy_file import read_policy
from scaleray.release.gate.stored_evidence import EVIDENCE, store_evidence
from scaleray.release.gates.policy import Policy
from scaleray.release.promote.pipeline import FOLDER, check_cluster, copy_pipeline, write_pipeline

ARTIFACTS = "promoted"
"""Folder of a run's artifacts with a subfolder for each promotion of it."""
PASSED = "pass"


@takes(ModelChoice)
def promote(
    runs: str | Sequence[str],
    alias: str | None = None,
    *,
    options: ModelChoice,
    model: str | None = None,
    against: Sequence[str] = (),
    policy: str | Path | Mapping[str, Any] | None = None,
    study: str | None = None,
    certificates: Sequence[str] = (),
    pipeline: str | Path | None = None,
    cluster: str = "local",
    say: Say = lambda text: None,
) -> Promotion:
    """Register the model of a run as a version in MLflow, and point `alias` to it if every gate passes.

    runs: the run with the model, and runs that repeat it with other seeds. model: name in the registry, by default that
    of the run's experiment. against, policy, study, certificates: as for `gate`. Without an alias, a version is created
    whatever the gates answer, and stores the answers. With an alias, a version is created only if all gates pass, with
    the pipeline that retrains it on a kind of cluster (local, kubernetes, slurm or ray-up). pipeline: folder to which
    the pipeline is copied.

    Raises UsageError for errors of use, and TrackingError if MLflow cannot be reached: the alias is then unchanged, and
    the same call continues."""
    import mlflow.pyfunc  # whole, before readers of runs import a part of it

    del mlflow
    uri = options.uri
    names = [runs] if isinstance(runs, str) else list(runs)
    if alias is not None:
        check_alias(alias)
    elif pipeline is not None:
        raise UsageError.problem("--pipeline", "requires an alias", "scaleray promote RUN --as ALIAS")
    check_cluster(cluster)
    held = read_policy(policy)
    with tempfile.TemporaryDirectory(dir=cache_folder("models")) as folder:
        workspace, out = Path(folder), Path(folder) / "model"
        with stage("running the gates"):
            evidence = collect(names, against=against, study=study, certificates=certificates, uri=uri)
            gates = evaluate_evidence(store_evidence(evidence, held, workspace / EVIDENCE), held, uri=uri)
        run = evidence.run
        if not run.run_id:
            problem = "is not in MLflow, which is required for a registered version"
            raise TrackingError.problem("The run", problem, "train with tracking")
        found = Promotion(
            model=model or _model_name(run), alias=alias, answer=gates.answer, not_passed=gates.not_passed,
            gates={gate.gate: gate.answer for gate in gates.gates}, run=run.name, run_id=run.run_id,
        )  # fmt: skip
        if alias is not None and gates.answer != PASSED:
            return found
        registry = ModelRegistry(uri)
        stored = _stored(registry, run)
        say(f"packing the model of {run.name}")
        found = dataclasses.replace(found, weights=_write(evidence.candidates[0], gates, workspace, out, options))
        if alias is not None:
            write_pipeline(evidence.candidates, out / MODEL, out / FOLDER, model=str(Named(found.model, alias)),
                           cluster=cluster, policy=held, uri=registry.uri)  # fmt: skip
        done = _registered(registry, found, stored, run, gates, out, held, say=say)
        if pipeline is not None:
            copy_pipeline(out / FOLDER, pipeline)
        return done


def _write(found: FoundRun, gates: GateRecord, workspace: Path, out: Path, options: ModelChoice) -> str:
    """Write MLflow's model with the evidence and answers of the gates, and return a description of its weights."""
    from scaleray.models.served import save_for_mlflow

    run, trained = training(found), trained_of(found, uri=options.uri)
    parts = find_parts(trained, options=options)
    if not parts.weights.has_hash:
        advice = "train it again to its end, as newer versions record hashes"
        raise CheckpointError.problem(
            "RUN", f"{run.name} has no recorded hash of its weights ({parts.weights.words})", advice
        )
    with stage("packing the model"):
        signature = pack(trained, parts, workspace / "packed", workload=options.workload)
        libraries = (run.environment.get("environment") or {}).get("packages") or {}
        save_for_mlflow(signature, workspace / "packed", out, libraries={k: v for k, v in libraries.items() if v})
    (workspace / EVIDENCE).rename(out / EVIDENCE)
    write_whole(out / GATES_FILE, gates.to_json())
    return parts.weights.words


def _id(files: Mapping[str, str], model: str, policy: Policy) -> str:
    """Id of a promotion, equal for equal weights, code, evidence, policy and name. files: SHA-256 by path."""
    steady = {
        name: digest
        for name, digest in files.items()
        if name.startswith((f"{EVIDENCE}/", "data/", f"{FOLDER}/"))  # MLflow's own files have the time in them
    }
    text = json.dumps([model, policy.model_dump(mode="json"), sorted(steady.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _registered(
    registry: ModelRegistry,
    found: Promotion,
    stored: Any,
    run: RunRecord,
    gates: GateRecord,
    out: Path,
    policy: Policy,
    *,
    say: Say,
) -> Promotion:
    """Create the version of the files in `out`, unless it exists, and give it the alias. stored: the run in MLflow."""
    files, by, known = digests(out), user_or_somebody(), registry.versions(found.model)
    promotion, before = _id(files, found.model, policy), last_given(known, found.alias) if found.alias else None
    # the first one: a version whose answer was lost may have been made twice
    version = next((one for one in reversed(known) if one.promotion == promotion), None)
    if version is not None:
        say(f"version {version.number} of {found.model} was already created by this promotion")
    else:
        statement_sha256 = write_statement(
            out, files, run, gates, promotion=promotion, model=found.model, weights=str(found.weights), by=by
        )
        with stage("writing to MLflow"):
            source = registry.upload(stored, out, f"{ARTIFACTS}/{promotion}")
            tags = {PROMOTION_TAG: promotion, STATEMENT_TAG: statement_sha256, "scaleray.by": by}
            tags |= {"scaleray.gates": gates.answer}
            tags |= {f"scaleray.gate.{name}": answer for name, answer in found.gates.items()}
            text = _description(found, run)
            version = registry.make(found.model, source=source, run_id=run.run_id, tags=tags, description=text)
        say(f"created version {version.number} of {found.model}")
    if found.alias is not None:
        named = registry.give(version, found.alias, by=by)
        if named.number != version.number:
            say(f"a later promotion took precedence: {found.alias} names version {named.number}")
    return dataclasses.replace(
        found,
        promotion=promotion,
        version=version.number,
        was=None if before is None else before.number,
        uri=f"{MODEL_URI}{Named(found.model, found.alias, None if found.alias else version.number)}",
        statement_sha256=version.tags.get(STATEMENT_TAG),
    )


def _description(found: Promotion, run: RunRecord) -> str:
    """Description of the version for its page in MLflow, as Markdown."""
    rows = "\n".join(f"| {name} | {answer} |" for name, answer in found.gates.items())
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in sorted(run.metrics.items()) if value is not None)
    workers = f"{run.workers} worker{'s' * (run.workers > 1)}"
    return (
        f"{run.name}: {run.strategy} on {workers}, {run.steps} steps. {metrics}\n\n| gate | answer |\n|---|---|\n{rows}"
    )


def _model_name(run: RunRecord) -> str:
    name = str((run.config.get("tracking") or {}).get("experiment") or "")
    if not name or set(name) & set("/:'"):
        raise UsageError(
            "--model",
            name or None,
            "the registry accepts only names without /, : and quotes",
            "for example --model digits",
        )
    return name


def _stored(registry: ModelRegistry, run: RunRecord) -> Any:
    """Get the run from MLflow. Raises TrackingError if it is deleted."""
    found = registry.run(run.run_id)
    if found is None or found.info.lifecycle_stage == "deleted":
        state = "missing" if found is None else "deleted"
        raise TrackingError.problem(
            "The MLflow run",
            f"{run.run_id} is {state}",
            "restore it, name its MLflow server with --uri, or promote another run",
        )
    return found
