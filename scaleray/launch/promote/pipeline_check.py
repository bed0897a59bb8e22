"""Whether a promoted model's pipeline trains what was promoted, and a folder elsewhere is still that pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scaleray.config import load_config
from scaleray.config.decides import Decides, decides
from scaleray.errors import ScaleRayError, first_line
from scaleray.gates.answer import Check
from scaleray.gates.statement import digests
from scaleray.launch.gate.kept_evidence import EVIDENCE, read_evidence
from scaleray.launch.promote.pipeline import FOLDER, JOB
from scaleray.records.json_record import jsonable, leaves

MAY_DIFFER = ("workload.name",)
"""Keys of the config in which the job may differ from the run: its code is next to it."""


def pipeline_checks(folder: Path, elsewhere: str | Path | None) -> Iterator[Check]:
    """folder: a version's files, which are whole. elsewhere: a copy of its pipeline; None: none is asked about."""
    own = folder / FOLDER
    if own.is_dir():
        yield _trains_the_same(folder)
    if elsewhere is None:
        return
    what = "the pipeline's folder is the promoted one"
    if not own.is_dir():
        yield Check(what=what, answer="inconclusive", words="the version has none: it was promoted without an alias")
        return
    there, here = digests(own), digests(Path(elsewhere).expanduser())
    wrong = [f"{name} is missing" for name in sorted(there.keys() - here.keys())]
    wrong += [f"{name} was changed" for name in sorted(there) if here.get(name, there[name]) != there[name]]
    wrong += [f"{name} was added" for name in sorted(here.keys() - there.keys())]
    remedy = "scaleray promote ... --pipeline FOLDER writes it again"
    words = "; ".join(wrong[:4]) or f"{len(there)} files"
    yield Check(what=what, answer="fail" if wrong else "pass", words=words, remedy=remedy if wrong else "")


def _trains_the_same(folder: Path) -> Check:
    """Whether the job's config decides the same training as the run's own."""
    what = "the pipeline trains what was promoted"
    evidence, _ = read_evidence(folder / EVIDENCE)
    try:
        job = load_config(folder / FOLDER / JOB, environ={})
    except ScaleRayError as exc:
        return Check(what=what, answer="fail", words=f"{JOB} is no config of this version: {first_line(exc)}")
    mine, theirs = (dict(leaves(jsonable(values))) for values in (job.to_dict(), evidence.run.config))
    differing = [
        key
        for key in sorted(mine)
        if key in theirs and mine[key] != theirs[key] and decides(key) is not Decides.NOTHING and key not in MAY_DIFFER
    ]
    if differing:
        return Check(what=what, answer="fail", words=f"{', '.join(differing[:4])} are not those of the run")
    return Check(what=what, answer="pass", words=f"{JOB} decides the same as {evidence.run.name}")
