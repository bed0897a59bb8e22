"""Each kind of tampering is found, or is not for the reason that tampering.md gives."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from scaleray.errors import CheckpointError
from scaleray.release.gate.gate import gate as judge
from scaleray.release.promote.promote import promote
from scaleray.release.promote.verify_promoted import check_promoted
from tests.release.gate.test_as_recorded import recorded  # noqa: F401 - a fixture
from tests.release.promote.conftest import LAST_STEP
from tests.release.promote.tampering import GATE, PROMOTE, STEP, TAMPERINGS, VERIFY, Recorded, as_markdown, put_back
from tests.release.promote.test_verified import promoted  # noqa: F401 - a fixture

DOCS = Path(__file__).parent / "tampering.md"
pytestmark = pytest.mark.combination


@pytest.fixture(scope="module")
def of_run(recorded):  # noqa: F811
    """A run with its study and certificate, all as recorded."""
    return Recorded(recorded, recorded, recorded / "run", "", f"sqlite:///{recorded}/mlflow.db")


@pytest.fixture(scope="module")
def of_version(promoted, four_runs):  # noqa: F811
    """A version that was promoted, and the run that it is of."""
    run_id, source, uri = promoted
    run = next(Path(one.run_dir) for one in four_runs if one.run_id == run_id)
    return Recorded(source, source, run, run_id, uri)


@pytest.fixture(scope="module")
def passing(of_run, of_version):
    """What passes while nothing is changed."""
    return {GATE: answers(of_run, GATE), **{by: answers(of_version, by) for by in (VERIFY, PROMOTE, STEP)}}


def answers(at: Recorded, by: str) -> set[str]:
    if by in (PROMOTE, STEP):
        try:
            return {
                f"version {promote(str(at.run), model='other', step=LAST_STEP if by == STEP else None, uri=at.uri).version}"
            }
        except CheckpointError:
            return set()
    if by != GATE:
        record = check_promoted("corners@champion", uri=at.uri)
    else:
        gates = ["fingerprint", "equality", "scaling", "operations"]
        record = judge(str(at.root / "run"), study=str(at.root / "study"), certificates=[str(at.root / "verify")],
                       gates=gates, uri=at.uri)  # fmt: skip
    return {check.what for gate in record.gates for check in gate.checks if check.answer == "pass"}


@contextlib.contextmanager
def tampered(at: Recorded, change):
    database = Path(at.uri.removeprefix("sqlite:///"))
    places = [at.root / name for name in ("run", "study", "verify", "mlartifacts") if (at.root / name).is_dir()]
    with put_back(database, *(places or [at.source, at.run])):
        change(at)
        yield


@pytest.mark.parametrize("one", TAMPERINGS, ids=[f"{one.place}: {one.what}" for one in TAMPERINGS])
def test_what_was_changed_is_found(of_run, of_version, passing, one):
    at, by = of_run if one.by == GATE else of_version, one.by
    with tampered(at, one.change):
        still = answers(at, by)
    assert (passing[by] <= still) == bool(one.missed), passing[by] - still
    assert answers(at, by) == passing[by], "what was changed is as it was again"


def test_the_table_of_the_docs_is_this_one():
    assert len(TAMPERINGS) >= 40
    assert as_markdown() in DOCS.read_text()
