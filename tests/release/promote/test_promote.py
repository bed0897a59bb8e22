"""Promoted models: what is made, what is refused, what is found when somebody has changed it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import scaleray
from scaleray.errors import TrackingError, UsageError, WorkloadError
from scaleray.models.registry import ModelRegistry, Named
from scaleray.release.promote.promote import promote
from scaleray.release.promote.rollback import rollback
from scaleray.release.promote.verify_promoted import check_promoted
from tests.release.promote.conftest import POLICY

pytestmark = pytest.mark.combination

ALONE = {**POLICY, "convergence": {**POLICY["convergence"], "margin": 0.99}}
"""Another policy, with which the same runs are another promotion."""


@pytest.fixture
def promoted(sides):
    candidates, baselines, uri = sides
    found = promote(candidates, "champion", against=baselines, policy=POLICY, uri=uri)
    assert found.answer == "pass", found.not_passed
    return found, uri


def failing(record):
    return {
        verify_promoted.what: verify_promoted.words
        for verify_promoted in record.gates[0].checks
        if verify_promoted.answer == "fail"
    }


def test_an_alias_names_the_version_when_every_gate_passes(promoted):
    found, uri = promoted
    version = ModelRegistry(uri).find(Named.parse("corners@champion"))
    assert (found.version, version.number, version.run_id) == (1, 1, found.run_id)
    assert {version.tags[f"scaleray.gate.{name}"] for name in found.gates} == {"pass"}
    record = check_promoted("corners@champion", uri=uri)
    assert record.answer == "pass", record.lines()


def test_nothing_is_made_where_a_gate_does_not_pass(sides):
    candidates, baselines, uri = sides
    more = {**POLICY, "convergence": {**POLICY["convergence"], "min_runs": 5}}
    found = promote(candidates, "champion", against=baselines, policy=more, uri=uri)
    assert (found.answer, found.version) == ("inconclusive", None)
    assert ModelRegistry(uri).versions("corners") == []
    assert "is unchanged" in found.lines()[-1] and any("requires 5" in line for line in found.lines())


def test_nothing_is_made_of_a_record_that_is_not_what_mlflow_was_told(sides, tmp_path):
    candidates, baselines, uri = sides
    changed = shutil.copytree(candidates[0], tmp_path / "changed")
    record = json.loads((changed / "record.json").read_text())
    record["metrics"]["val/accuracy"] = 0.999
    (changed / "record.json").write_text(json.dumps(record))
    found = promote([str(changed), candidates[1]], "champion", against=baselines, policy=POLICY, uri=uri)
    assert (found.gates["fingerprint"], found.version) == ("fail", None)
    assert any("differs from MLflow: metrics.val/accuracy" in line for line in found.not_passed)


def test_without_an_alias_a_version_is_made_with_the_answers_of_the_gates(sides):
    candidates, _, uri = sides
    found = promote(candidates[0], uri=uri)
    version = ModelRegistry(uri).find(Named("corners", number=1))
    assert found.version == 1 and found.uri == "models:/corners/1" and not version.aliases
    assert version.tags["scaleray.gate.convergence"] == "inconclusive" == found.gates["convergence"]


def test_the_same_promotion_again_is_the_same_version(promoted, sides):
    found, uri = promoted
    again = promote(sides[0], "champion", against=sides[1], policy=POLICY, uri=uri)
    assert (again.version, again.promotion) == (found.version, found.promotion)
    assert len(ModelRegistry(uri).versions("corners")) == 1


def test_a_promotion_that_is_cut_off_promotes_nothing_and_goes_on_when_it_is_given_again(sides, monkeypatch):
    candidates, baselines, uri = sides
    calls = ["upload", "make", "give"]

    def away(*args, **more):
        raise TrackingError("MLflow at", uri, "it does not answer")

    for call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(ModelRegistry, call, away)
            with pytest.raises(TrackingError, match="does not answer"):
                promote(candidates, "champion", against=baselines, policy=POLICY, uri=uri)
        assert ModelRegistry(uri).expected("corners", "champion") is None
        assert not any(one.aliases for one in ModelRegistry(uri).versions("corners"))
    found = promote(candidates, "champion", against=baselines, policy=POLICY, uri=uri)
    assert found.version == 1 and check_promoted("corners@champion", uri=uri).answer == "pass"


def test_an_answer_that_is_lost_after_a_version_is_made_makes_no_second_one(sides, monkeypatch):
    candidates, baselines, uri = sides
    real = ModelRegistry.make

    def lost(self, *args, **more):
        real(self, *args, **more)
        raise TrackingError("MLflow at", uri, "the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRegistry, "make", lost)
        with pytest.raises(TrackingError, match="was lost"):
            promote(candidates, "champion", against=baselines, policy=POLICY, uri=uri)
    assert promote(candidates, "champion", against=baselines, policy=POLICY, uri=uri).version == 1
    assert len(ModelRegistry(uri).versions("corners")) == 1


class TestChecks:
    def test_one_changed_byte_is_found(self, promoted):
        _, uri = promoted
        source = Path(ModelRegistry(uri).find(Named("corners", number=1)).source)
        file = next((source / "data/packed/weights").glob("*.safetensors"))
        whole = file.read_bytes()
        for name in ("data/packed/weights/" + file.name, "gates.json", "evidence/evidence.json", "MLmodel"):
            before = (source / name).read_bytes()
            (source / name).write_bytes(before[:-2] + bytes([before[-2] ^ 1]) + before[-1:])
            assert f"{name} was changed" in failing(check_promoted("corners@champion", uri=uri)).popitem()[1]
            (source / name).write_bytes(before)
        assert whole == file.read_bytes() and check_promoted("corners@champion", uri=uri).answer == "pass"
        (source / "data/packed/code/more.py").write_text("")
        assert "more.py was added" in failing(check_promoted("corners@champion", uri=uri)).popitem()[1]

    def test_a_statement_that_was_written_anew_is_found_by_the_tag_of_its_version(self, promoted):
        _, uri = promoted
        source = Path(ModelRegistry(uri).find(Named("corners", number=1)).source)
        statement = json.loads((source / "statement.json").read_text())
        statement["predicate"]["runDetails"]["metadata"]["by"] = "somebody else"
        (source / "statement.json").write_text(json.dumps(statement))
        words = failing(check_promoted("corners/1", uri=uri)).popitem()[1]
        assert words == "statement.json does not belong to the version"

    def test_an_alias_that_was_moved_by_hand_is_found(self, promoted, sides):
        found, uri = promoted
        registry = ModelRegistry(uri)
        promote(sides[0][1], uri=uri)
        registry.client.set_registered_model_alias("corners", "champion", "2")
        found = failing(check_promoted("corners@champion", uri=uri))
        assert found["the alias names the promoted version"] == "it names version 2; version 1 was promoted last"
        assert "gates' answer" in found["the version of an alias has passed"]
        registry.client.set_registered_model_alias("corners", "challenger", "2")
        found = failing(check_promoted("corners@challenger", uri=uri))
        assert "set manually" in found["the alias names the promoted version"]

    def test_a_deleted_run_is_found(self, promoted):
        found, uri = promoted
        ModelRegistry(uri).client.delete_run(found.run_id)
        assert "was deleted" in failing(check_promoted("corners@champion", uri=uri))["its source run exists"]

    def test_files_that_are_gone_are_found(self, promoted):
        _, uri = promoted
        source = Path(ModelRegistry(uri).find(Named("corners", number=1)).source)
        kept = source.rename(source.with_name("elsewhere"))
        words = failing(check_promoted("corners@champion", uri=uri)).popitem()[1]
        kept.rename(source)
        assert "not there" in words or "missing" in words

    def test_weights_that_the_run_has_not_are_found(self, promoted, monkeypatch, tmp_path):
        import torch

        found, uri = promoted
        run = Path(check_promoted("corners@champion", uri=uri).candidates[0])
        assert str(run) == found.run_id
        from scaleray.release.promote import verify_promoted

        real = verify_promoted.find_parts

        def others(name, **more):
            parts = real(name, **more)
            if name == found.run_id:
                parts.weights.tensors["0.bias"] = torch.zeros(8)
            return parts

        monkeypatch.setattr(verify_promoted, "find_parts", others)
        record = check_promoted("corners@champion", uri=uri)
        assert failing(record) == {"the weights are those of the run": "1 tensors differ, first 0.bias"}


class TestRollback:
    def test_the_alias_goes_back_to_the_version_before(self, promoted, sides):
        _, uri = promoted
        second = promote(sides[0][1], "champion", against=sides[1], policy=ALONE, uri=uri)
        assert (second.version, second.was) == (2, 1), second.not_passed
        assert rollback("corners@champion", uri=uri) == 1
        assert check_promoted("corners@champion", uri=uri).answer == "pass"
        with pytest.raises(UsageError, match="has no version before 1"):
            rollback("corners@champion", uri=uri)
        third = promote(sides[0][0], "champion", against=sides[1], policy=ALONE, uri=uri)
        assert third.version == 3, third.not_passed
        assert rollback("corners@champion", uri=uri) == 1, "version 2 was taken back"
        assert rollback("corners@champion", to=2, uri=uri) == 2

    @pytest.fixture
    def second(self, promoted, sides):
        """The files of version 1, beside which a second one has the alias, and the URI."""
        _, uri = promoted
        assert promote(sides[0][1], "champion", against=sides[1], policy=ALONE, uri=uri).version == 2
        return Path(ModelRegistry(uri).find(Named("corners", number=1)).source), uri

    @pytest.mark.parametrize("gone", [False, True])
    def test_a_version_that_was_changed_or_is_gone_takes_the_alias_only_for_a_reason(self, second, gone):
        source, uri = second
        if gone:
            source.rename(source.with_name("elsewhere"))
        else:
            (source / "data/packed/code/corners.py").write_text("raise SystemExit('code of somebody else')")
        with pytest.raises(TrackingError, match=r"(?s)changed since its promotion: .*--unchecked REASON"):
            rollback("corners@champion", uri=uri)
        assert ModelRegistry(uri).find(Named.parse("corners@champion")).number == 2
        assert rollback("corners@champion", unchecked="version 2 answers nonsense", uri=uri) == 1
        found = ModelRegistry(uri).find(Named.parse("corners@champion"))
        assert found.tags["scaleray.given.champion"].endswith("unchecked: version 2 answers nonsense")

    def test_in_an_incident_neither_run_nor_evidence_nor_baselines_are_asked_for(self, second, monkeypatch):
        source, uri = second
        registry = ModelRegistry(uri)
        registry.client.delete_run(registry.find(Named("corners", number=1)).run_id)
        shutil.rmtree(source / "evidence")
        monkeypatch.setattr("scaleray.recording.find_record.find_run", lambda *words, **more: 1 / 0)
        assert rollback("corners@champion", uri=uri) == 1

    def test_a_version_that_no_gate_let_through_is_refused(self, promoted, sides):
        _, uri = promoted
        promote(sides[0][1], uri=uri)
        with pytest.raises(UsageError, match="never promoted as champion"):
            rollback("corners@champion", to=2, uri=uri)


class TestUse:
    rows = {"x": np.eye(4, dtype=np.float32)}  # noqa: RUF012

    def test_a_promoted_model_is_loaded_and_predicts_as_its_run(self, promoted, sides):
        found, uri = promoted
        model, own = scaleray.load("models:/corners@champion", uri=uri), scaleray.load(sides[0][0])
        assert model.words == f"the final weights of {found.run}" and model.step == own.step
        mine, theirs = model.predict(self.rows), own.predict(self.rows)
        assert np.array_equal(mine["corner"], theirs["corner"]) and mine["name"] == theirs["name"]
        predicted = scaleray.predict("models:/corners/1", self.rows, uri=uri)
        assert np.array_equal(predicted.columns["corner"], theirs["corner"])

    def test_a_promoted_model_is_evaluated_into_its_run_and_exported(self, promoted, tmp_path):
        found, uri = promoted
        measured = scaleray.evaluate("models:/corners@champion", local=True, uri=uri)
        values = ModelRegistry(uri).client.get_run(found.run_id).data.metrics
        assert measured.recorded and all(values[f"evaluate/{n}"] == v for n, v in measured.metrics.items())
        made = scaleray.export_model("models:/corners@champion", tmp_path / "a.pt2", format="torch.export", uri=uri)
        assert made.difference <= made.tolerance and made.any_rows

    def test_a_model_that_was_changed_is_not_loaded(self, promoted, monkeypatch, tmp_path):
        _, uri = promoted
        source = Path(ModelRegistry(uri).find(Named("corners", number=1)).source)
        (source / "data/packed/code/corners.py").write_text("raise SystemExit('code of somebody else')")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(TrackingError, match=r"corners.py was changed"):
            scaleray.load("models:/corners@champion", uri=uri)

    def test_mlflow_loads_it_by_itself_and_says_what_it_takes(self, promoted):
        import mlflow.pyfunc

        _, uri = promoted
        version = ModelRegistry(uri).find(Named("corners", number=1))
        model = mlflow.pyfunc.load_model(version.source)
        assert [(one.name, one.shape) for one in model.metadata.signature.inputs] == [("x", (-1, 4))]
        assert check_promoted("corners@champion", uri=uri).answer == "pass", "it was loaded where it lies"
        answers = model.predict(self.rows)
        assert answers["name"] == [f"c{k}" for k in answers["corner"]]


@pytest.mark.parametrize("alias", ["latest", "v2", "two words", ""])
def test_an_alias_that_mlflow_refuses_is_refused_first(sides, alias):
    with pytest.raises(UsageError, match="not be latest or v1"):
        promote(sides[0], alias, uri=sides[2])


@pytest.mark.parametrize("name", ["corners", "corners@", "corners/x", "@champion"])
def test_a_name_of_another_form_names_the_form(sides, name):
    with pytest.raises(UsageError, match="NAME@ALIAS or NAME/VERSION"):
        check_promoted(name, uri=sides[2])


def test_what_is_not_there_names_what_is(promoted):
    _, uri = promoted
    with pytest.raises(TrackingError, match="corners has 1 versions and @champion"):
        check_promoted("corners@challenger", uri=uri)
    with pytest.raises(TrackingError, match="there is no model of this name"):
        check_promoted("circles@champion", uri=uri)
    with pytest.raises(TrackingError, match="does not exist"):
        check_promoted("corners@champion", uri="sqlite:////nowhere/mlflow.db")


def test_a_deleted_run_is_not_promoted(sides):
    candidates, baselines, uri = sides
    run_id = json.loads((Path(candidates[0]) / "record.json").read_text())["run_id"]
    ModelRegistry(uri).client.delete_run(run_id)
    found = promote(candidates, "champion", against=baselines, policy=POLICY, uri=uri)
    assert found.answer == "fail" and "it was deleted" in str(found.not_passed)


def test_a_class_that_is_in_no_file_is_refused_with_what_to_do(sides):
    class Local(type(scaleray.load(sides[0][0]).workload)):
        pass

    with pytest.raises(WorkloadError, match="not in a file"):
        promote(sides[0][0], workload=Local(), uri=sides[2])


def test_two_promotions_at_once_agree_on_one_version(sides):
    """Each moves the alias between any two calls of the other; both end with the newest."""
    from concurrent.futures import ThreadPoolExecutor

    candidates, _, uri = sides
    made = [promote(run, uri=uri).version for run in candidates]
    registry = ModelRegistry(uri)
    versions = {one.number: one for one in registry.versions("corners")}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            list(pool.map(lambda number: ModelRegistry(uri).give(versions[number], "champion", by="me"), made))
            assert (
                registry.find(Named.parse("corners@champion")).number == registry.expected("corners", "champion").number
            )
