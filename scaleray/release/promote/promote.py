"""Promotion of a trained model: gates, a folder with its provenance, a version, an alias.

The alias moves last, so an interrupted promotion has no effect. Its id depends on the model and the evidence: the same
command finds the existing version and continues from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from scaleray.common.filesystems import write_whole
from scaleray.common.options import takes
from scaleray.common.own_folder import cache_folder
from scaleray.common.progress import stage
from scaleray.common.user_name import user_or_somebody
from scaleray.errors import CheckpointError, TrackingError, UsageError
from scaleray.models.fetched import MODEL
from scaleray.models.load import find_parts
from scaleray.models.model_options import ModelChoice
from scaleray.models.packed import pack
from scaleray.models.registry import MODEL_URI, STATEMENT_TAG, ModelRegistry, ModelVersion, Named, check_alias
from scaleray.models.trained_run import TrainedRun, find_trained
from scaleray.records.gates import GateRecord
from scaleray.records.promotion import Promotion
from scaleray.records.run_record import RunRecord, Say
from scaleray.records.statement import GATES_FILE, STATEMENT, digests, file_digest, statement_of
from scaleray.release.gate.evidence import collect
from scaleray.release.gate.gate import judge_evidence
from scaleray.release.gate.kept_evidence import EVIDENCE, keep_evidence, read_evidence
from scaleray.release.gate.policy_file import read_policy
from scaleray.release.gates.policy import Policy
from scaleray.release.promote.pipeline import FOLDER, check_cluster, copy_pipeline, write_pipeline
from scaleray.release.promote.version_tags import version_description, version_tags

ARTIFACTS = "promoted"
"""Folder of a run's artifacts with a folder for each promotion of it."""
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
    """Register the model of a run as a version in MLflow, and let `alias` name it if every gate passes.

    runs: the run whose model it is, and runs that repeat it with other seeds. model: name in the registry, by default
    that of the run's experiment. against, policy, study, certificates: as for `gate`. Without an alias a version is
    made whatever the gates answer, with their answers; with one nothing is made unless all pass, and the version has
    the pipeline that trains it again on a kind of cluster (local, kubernetes, slurm or ray-up). pipeline: folder to
    copy that to.

    Raises UsageError for what the user can mend, and TrackingError if MLflow cannot be reached: then the alias names
    the version that it named before, and the same call continues.
    """
    import mlflow.pyfunc  # whole, before readers of runs import a part of it

    del mlflow
    uri = options.uri
    names = [runs] if isinstance(runs, str) else list(runs)
    if alias is not None:
        check_alias(alias)
    elif pipeline is not None:
        raise UsageError("--pipeline", str(pipeline), "it needs an alias", "scaleray promote RUN --as ALIAS")
    check_cluster(cluster)
    held = read_policy(policy)
    with tempfile.TemporaryDirectory(dir=cache_folder("models")) as place:
        out = Path(place) / "model"
        with stage("running the gates"):
            evidence = collect(names, against=against, study=study, certificates=certificates, uri=uri)
            keep_evidence(evidence, held, Path(place) / EVIDENCE)
            # what is judged is what is kept: asked again of it, the gates answer the same
            kept, _ = read_evidence(Path(place) / EVIDENCE)
            gates = judge_evidence(kept, held, uri=uri)
        run, name = evidence.run, model or _model_name(evidence.run)
        answers: dict[str, str] = {gate.gate: gate.answer for gate in gates.gates}
        found = Promotion(
            model=name, alias=alias, answer=gates.answer, gates=answers, not_passed=_not_passed(gates), run=run.name,
            run_id=_in_mlflow(run),
        )  # fmt: skip
        if alias is not None and gates.answer != PASSED:
            return found
        registry = ModelRegistry(uri)
        _refuse_deleted(registry, run)
        say(f"packing the model of {run.name}")
        trained = find_trained(evidence.candidates[0].folder or names[0], uri=uri)  # the run that was judged
        words = _write(trained, out, Path(place), gates, run, options)
        if alias is not None:
            write_pipeline(evidence.candidates, out / MODEL, out / FOLDER, model=str(Named(name, alias)),
                           cluster=cluster, policy=held, uri=registry.uri)  # fmt: skip
        files = digests(out)
        chosen = dataclasses.replace(found, promotion=_id(files, name, held), weights=words)
        done = _registered(registry, chosen, out, files, run, gates, say=say)
        if pipeline is not None:
            copy_pipeline(out / FOLDER, pipeline)
        return done


def _write(trained: TrainedRun, out: Path, place: Path, gates: GateRecord, run: RunRecord, options: ModelChoice) -> str:
    """Write MLflow's model with the evidence and answers of the gates, and return a description of its weights."""
    from scaleray.models.served import save_for_mlflow

    parts = find_parts(trained, **options.parts)
    if not parts.weights.has_hash:
        advice = "train it again to its end: this version records hashes"
        raise CheckpointError(parts.weights.words, f"those of {run.name}", "they have no recorded hash", advice)
    with stage("packing the model"):
        packed = pack(trained, parts, place / "packed", workload=options.workload)
        libraries = (run.environment.get("environment") or {}).get("packages") or {}
        save_for_mlflow(packed, place / "packed", out, libraries={k: v for k, v in libraries.items() if v})
    (place / EVIDENCE).rename(out / EVIDENCE)
    write_whole(out / GATES_FILE, gates.to_json())
    return parts.weights.words


def _not_passed(gates: GateRecord) -> list[str]:
    return [
        f"{gate.gate}: {check.what}: {check.words}"
        for gate in gates.gates
        for check in gate.checks
        if check.answer != PASSED
    ]


def _id(files: Mapping[str, str], model: str, policy: Policy) -> str:
    """Id of a promotion: the same for the same weights, code, evidence, policy and name. files: SHA-256 by path."""
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
    out: Path,
    files: Mapping[str, str],
    run: RunRecord,
    gates: GateRecord,
    *,
    say: Say,
) -> Promotion:
    by = user_or_somebody()
    before = registry.expected(found.model, found.alias) if found.alias else None
    version = registry.of_promotion(found.model, str(found.promotion))
    if version is None:
        version = _made(registry, found, out, files, run, gates, by=by)
        say(f"made version {version.number} of {found.model}")
    else:
        say(f"version {version.number} of {found.model} was already made by this promotion")
    if found.alias is not None:
        named = registry.give(version, found.alias, by=by)
        if named.number != version.number:
            say(f"a later promotion won: {found.alias} names version {named.number}")
    return dataclasses.replace(
        found,
        version=version.number,
        was=None if before is None else before.number,
        uri=f"{MODEL_URI}{Named(found.model, found.alias, None if found.alias else version.number)}",
        statement_sha256=version.tags.get(STATEMENT_TAG),
    )


def _made(
    registry: ModelRegistry,
    found: Promotion,
    out: Path,
    files: Mapping[str, str],
    run: RunRecord,
    gates: GateRecord,
    *,
    by: str,
) -> ModelVersion:
    assert found.promotion is not None and found.weights is not None
    statement = statement_of(
        files,
        run,
        gates,
        promotion=found.promotion,
        model=found.model,
        weights=found.weights,
        by=by,
        at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        version=metadata.version("scaleray"),
    )
    write_whole(out / STATEMENT, json.dumps(statement, indent=1))
    with stage("writing to MLflow"):
        source = registry.upload(found.run_id, out, f"{ARTIFACTS}/{found.promotion}")
        tags = version_tags(found, gates, by=by, statement_sha256=file_digest(out / STATEMENT))
        return registry.make(
            found.model, source=source, run_id=found.run_id, tags=tags, description=version_description(found, run)
        )


def _model_name(run: RunRecord) -> str:
    name = str((run.config.get("tracking") or {}).get("experiment") or "")
    if not name or set(name) & set("/:'"):
        raise UsageError(
            "--model", name or None, "the registry needs a name without /, : and quotes", "for example --model digits"
        )
    return name


def _in_mlflow(run: RunRecord) -> str:
    if not run.run_id:
        raise TrackingError.problem(
            "The run", "is not in MLflow: a version names its MLflow run", "train with tracking"
        )
    return run.run_id


def _refuse_deleted(registry: ModelRegistry, run: RunRecord) -> None:
    found = registry.run(run.run_id)
    if found is None or found.info.lifecycle_stage == "deleted":
        state = "not there" if found is None else "deleted"
        raise TrackingError(
            "the run in MLflow",
            run.run_id,
            f"it is {state}",
            "restore it, name its MLflow with --uri, or promote another run",
        )
