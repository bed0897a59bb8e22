"""Check that a promoted model is unchanged, by recomputing everything from its stored files."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from scaleray.checkpoints.model_layout import TRAINED
from scaleray.common.own_folder import cache_folder
from scaleray.common.progress import stage
from scaleray.config import load_config
from scaleray.config.decides import Decides, decides
from scaleray.errors import ScaleRayError, first_line
from scaleray.models.fetched import MODEL, changes
from scaleray.models.load import find_parts
from scaleray.models.registry import STATEMENT_TAG, ModelRegistry, ModelVersion, Named
from scaleray.records.gate_answer import Answer, Check, gate_of
from scaleray.records.gates import GateRecord
from scaleray.records.json_record import jsonable, leaves
from scaleray.records.statement import GATES_FILE, digests
from scaleray.release.gate.gate import evaluate_evidence
from scaleray.release.gate.stored_evidence import EVIDENCE, read_evidence
from scaleray.release.promote.pipeline import FOLDER, JOB
from scaleray.release.promote.promote import PASSED

MAY_DIFFER = ("workload.name",)
"""Config keys in which the job may differ from the run, since its code is in its own folder."""


def pipeline_checks(folder: Path, elsewhere: str | Path | None) -> Iterator[Check]:
    """Checks of a version's pipeline. folder: the version's complete files. elsewhere: copy of its pipeline to check,
    if any."""
    own = folder / FOLDER
    if own.is_dir():
        yield _trains_the_same(folder)
    if elsewhere is None:
        return
    what = "the pipeline's folder is unchanged since the promotion"
    if not own.is_dir():
        yield Check(what=what, answer="inconclusive", words="it has no pipeline: it was promoted without an alias")
        return
    there, here = digests(own), digests(Path(elsewhere).expanduser())
    wrong = [f"{name} is missing" for name in sorted(there.keys() - here.keys())]
    wrong += [f"{name} was changed" for name in sorted(there) if here.get(name, there[name]) != there[name]]
    wrong += [f"{name} was added" for name in sorted(here.keys() - there.keys())]
    remedy = "scaleray promote ... --pipeline FOLDER writes it again"
    words = "; ".join(wrong[:4]) or f"{len(there)} files"
    yield Check(what=what, answer="fail" if wrong else "pass", words=words, remedy=remedy if wrong else "")


def _trains_the_same(folder: Path) -> Check:
    """Whether the job's config defines the same training as the run's own."""
    what = "the pipeline retrains the promoted model"
    evidence, _ = read_evidence(folder / EVIDENCE)
    try:
        job = load_config(folder / FOLDER / JOB, environ={})
    except ScaleRayError as exc:
        return Check(what=what, answer="fail", words=f"{JOB} is not a config of this version: {first_line(exc)}")
    mine, theirs = (dict(leaves(jsonable(values))) for values in (job.to_dict(), evidence.run.config))
    differing = [
        key
        for key in sorted(mine)
        if key in theirs and mine[key] != theirs[key] and decides(key) is not Decides.NOTHING and key not in MAY_DIFFER
    ]
    if differing:
        return Check(what=what, answer="fail", words=f"{', '.join(differing[:4])} are not those of the run")
    return Check(what=what, answer="pass", words=f"{JOB} defines the same training as {evidence.run.name}")


BYPASS = "the alias names the promoted version"
DATE = "%Y-%m-%dT%H:%M:%S%z"


def check_promoted(model: str, *, pipeline: str | Path | None = None, uri: str | None = None) -> GateRecord:
    """Check a version, given by number or alias: the alias, every byte, the gates, the pipeline, the run and the
    weights.

    model: `NAME@ALIAS` or `NAME/VERSION`. pipeline: a folder that must contain the version's pipeline. Returns an
    answer for each check, as for gates. Raises UsageError for another form, TrackingError if there is no such version
    or MLflow cannot be reached."""
    named = Named.parse(model)
    registry = ModelRegistry(uri)
    version = registry.find(named)
    with tempfile.TemporaryDirectory(dir=cache_folder("models")) as copies, stage("checking the promoted version"):
        checks = [_alias(registry, named, version), *_kept(registry, version, Path(copies), pipeline)]
    result = gate_of("promotion", checks)
    return GateRecord(
        answer=result.answer,
        gates=[result],
        run=f"{named}, version {version.number}",
        candidates=[version.run_id],
        baselines=[],
        policy={},
        notes=[],
        date=time.strftime(DATE),
    )


def _alias(registry: ModelRegistry, named: Named, version: ModelVersion) -> Check:
    if named.alias is None:
        names = ", ".join(version.aliases) or "no alias"
        return Check(what=BYPASS, answer="pass", words=f"version {version.number} was requested; {names} names it")
    expected = registry.expected(named.model, named.alias)
    if expected is None:
        words = f"nothing was promoted as {named.alias}: it was set manually on version {version.number}"
        return Check(what=BYPASS, answer="fail", words=words, remedy=f"scaleray promote RUN --as {named.alias}")
    if expected.number != version.number:
        words = f"it names version {version.number}; version {expected.number} was promoted last"
        return Check(
            what=BYPASS, answer="fail", words=words, remedy=f"scaleray rollback {named} --to {expected.number}"
        )
    return Check(what=BYPASS, answer="pass", words=f"version {version.number}")


def _kept(registry: ModelRegistry, version: ModelVersion, copies: Path, pipeline: str | Path | None) -> Iterator[Check]:
    """Checks of a version's stored files, some of which need a complete folder."""
    whole = "every file is unchanged since the promotion"
    if not version.tags.get(STATEMENT_TAG):
        yield Check(what=whole, answer="fail", words="the version was not created by scaleray promote")
        return
    try:
        folder = registry.download(version, copies)
    except ScaleRayError as exc:
        yield Check(what=whole, answer="fail", words=f"its files are missing: {exc}")
        yield _source(registry, version)
        return
    wrong = changes(folder, version)
    answer: Answer = "fail" if wrong else "pass"
    yield Check(what=whole, answer=answer, words="; ".join(wrong[:4]) or "every byte", numbers={"changed": len(wrong)})
    yield _source(registry, version)
    if not wrong:
        yield from _gates(folder, version, registry.uri)
        yield from pipeline_checks(folder, pipeline)
        yield _weights(folder, version, registry.uri)


def _gates(folder: Path, version: ModelVersion, uri: str) -> Iterator[Check]:
    """Check that the gates give the recorded answers to the stored evidence, and passed."""
    then = GateRecord.from_json((folder / GATES_FILE).read_bytes())
    evidence, policy = read_evidence(folder / EVIDENCE)
    again = evaluate_evidence(evidence, policy, now=datetime.strptime(then.date, DATE).timestamp(), uri=uri)
    before, now = (_answers(record) for record in (then, again))
    what = "the gates give the same answers to the stored evidence"
    # a newer version may ask more, or by other words: what both asked counts, and what each gate came to
    differing = [key for key in before.keys() & now.keys() if before[key] != now[key]]
    if differing:
        # what cannot be asked any more was not changed: a baseline's MLflow that is away, say
        answer: Answer = "inconclusive" if all(now[key] == "inconclusive" for key in differing) else "fail"
        words = "; ".join(f"{key}: {before[key]} at the promotion, {now[key]} now" for key in sorted(differing))
        yield Check(what=what, answer=answer, words=words)
    else:
        yield Check(what=what, answer="pass", words=", ".join(f"{one.gate} {one.answer}" for one in again.gates))
    if version.aliases:
        words = f"{', '.join(version.aliases)} names a version with the gates' answer {then.answer}"
        yield Check(
            what="the version of an alias has passed", answer=PASSED if then.answer == PASSED else "fail", words=words
        )


def _answers(record: GateRecord) -> dict[str, Answer]:
    """Answers of each gate and of each of its checks."""
    checks = {f"{gate.gate}, {check.what}": check.answer for gate in record.gates for check in gate.checks}
    return {gate.gate: gate.answer for gate in record.gates} | checks


def _source(registry: ModelRegistry, version: ModelVersion) -> Check:
    what = "its source run exists"
    found = registry.run(version.run_id)
    if found is None:
        return Check(what=what, answer="fail", words=f"{version.run_id} is no longer in MLflow")
    if found.info.lifecycle_stage == "deleted":
        words = f"{found.info.run_name} was deleted; `mlflow gc` will remove its files, including the model"
        return Check(what=what, answer="fail", words=words, remedy=f"mlflow runs restore --run-id {version.run_id}")
    return Check(what=what, answer="pass", words=str(found.info.run_name))


def _weights(folder: Path, version: ModelVersion, uri: str) -> Check:
    """Whether the weights equal those of the run, in its folder or in MLflow."""
    import torch

    what = "the weights are those of the run"
    try:
        packed = find_parts(folder / MODEL)
    except ScaleRayError as exc:
        return Check(what=what, answer="fail", words=f"the packed weights cannot be read: {first_line(exc)}")
    words = packed.weights.words
    number, which = words.rpartition(" ")[2], TRAINED if f" {TRAINED} " in words else None
    step = int(number) if number.isdigit() else None
    try:
        theirs = find_parts(version.run_id, step=step, weights=which, workload=packed.workload, uri=uri).weights
    except ScaleRayError as exc:
        words = f"the run's weights cannot be compared: {first_line(exc)}"
        return Check(what=what, answer="inconclusive", words=words)
    if not theirs.has_hash:
        return Check(what=what, answer="inconclusive", words="the run recorded no hash of its weights")
    mine, there = packed.weights.tensors, theirs.tensors
    if differing := [name for name in mine if name not in there or not torch.equal(mine[name], there[name])]:
        return Check(what=what, answer="fail", words=f"{len(differing)} tensors differ, first {differing[0]}")
    return Check(what=what, answer="pass", words=f"{len(mine)} tensors of {words}")
