"""What `--json` promises of every command: one object with the version of its keys and the paths of what was written."""

import json
import re
import shutil
from pathlib import Path

import pytest
import study_examples

from scaleray.cli.main import run_command
from scaleray.cli.output import written_in
from scaleray.studies.compare.comparison import compare

ROOT = Path(__file__).parents[2]
PLAN = ("plan", "--model", "gpt2", "--cluster", "h100:8x2", "--global-batch", "64")


def asked(capsys, *words):
    assert run_command([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def study(tmp_path):
    """Folder of a study."""
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "record.json").write_text(study_examples.study().to_json())
    return folder


def test_lists_of_keys_and_configs_are_objects_with_a_version(capsys):
    keys = asked(capsys, "config", "keys", "optimizer")
    assert keys["schema_version"] == 1 and keys["written"] == {} and keys["keys"][0]["key"] == "optimizer.name"
    assert keys["keys"][0]["choices"] == ["adamw", "adam", "sgd", "lars", "lamb"]
    shown = asked(capsys, "config", "show", "-c", ROOT / "jobs/digits.yaml", "--no-data")
    assert shown["schema_version"] == 1 and shown["config"]["batch"]["global_size"]


@pytest.mark.combination
def test_a_plan_names_the_files_that_it_wrote(capsys, tmp_path):
    page, best = tmp_path / "plan.html", tmp_path / "best.yaml"
    shown = asked(capsys, *PLAN, "--html", page, "--write", best)
    assert shown["schema_version"] == 1 and shown["num_layouts"] > 0
    assert shown["written"] == {"config": str(best), "page": str(page)} and page.exists() and best.exists()


@pytest.mark.combination
def test_a_report_names_its_page_and_what_is_beside_it(capsys, study, tmp_path):
    shown = asked(capsys, "report", study, "--out", tmp_path / "out")
    assert {"report.html", "points.csv"} <= shown["written"].keys()
    assert all(Path(path).is_absolute() and Path(path).exists() for path in shown["written"].values())


@pytest.mark.combination
def test_a_comparison_has_a_version_and_wrote_nothing(capsys, study, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(study, other)
    record = json.loads((other / "record.json").read_text()) | {"name": "other", "run_id": "2"}
    (other / "record.json").write_text(json.dumps(record))
    shown = asked(capsys, "compare", study, other)
    printed = repr(compare(str(study), str(other))).splitlines()
    assert printed[0] == "scaling study: A digits-study, B other" and 3 <= len(printed) <= 10
    assert shown["schema_version"] == 1 and shown["written"] == {} and shown["kind"] == "scaling study"


def test_a_folder_is_listed_by_name_and_one_that_is_away_is_named_alone(tmp_path):
    (tmp_path / "weights.pt").write_text("")
    (tmp_path / ".lock").write_text("")
    assert written_in(str(tmp_path)) == {"folder": str(tmp_path), "weights.pt": str(tmp_path / "weights.pt")}
    assert written_in(str(tmp_path / "no")) == {"folder": str(tmp_path / "no")}


def test_schemas_are_printed_and_written_with_the_line_that_editors_need(capsys, tmp_path):
    assert run_command(["config", "schema", "study"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "StudyRecord"
    out = tmp_path / "config.schema.json"
    assert run_command(["config", "schema", "--out", str(out)]) == 0
    assert f"# yaml-language-server: $schema={out}" in capsys.readouterr().out
    assert "properties" in json.loads(out.read_text())
    assert run_command(["config", "schema", "--out", str(tmp_path / "no" / "x")]) == 2


def test_no_command_prints_json_of_its_own():
    for path in (ROOT / "scaleray/cli").glob("*.py"):
        if path.name not in ("output.py", "config.py"):  # config schema prints a schema
            assert not re.search(r"print\(.*(to_json\(|dumps\()", path.read_text()), path.name
