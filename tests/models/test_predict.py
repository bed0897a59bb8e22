"""What a run's model says of rows, from files of every format, from memory and from the run's own splits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import scaleray
from scaleray.cli.main import run_command
from scaleray.errors import DataError, UsageError, WorkloadError


@pytest.fixture
def rows():
    return np.random.default_rng(1).normal(size=(23, 4)).astype(np.float32)


def expected(run, rows):
    """What the module says, called by hand."""
    with torch.no_grad():
        return scaleray.load(run).module(torch.from_numpy(rows)).numpy()


def table_of(rows, **more):
    return pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), 4), **more})


def write(rows, path):
    """The rows in the format of the path's ending; CSV has a column for each number."""
    if path.suffix == ".parquet":
        pq.write_table(table_of(rows), path, row_group_size=5)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(pa.table({f"x_{n}": rows[:, n] for n in range(4)}), path)
    else:
        path.write_text("".join(json.dumps({"x": row.tolist()}) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["rows.parquet", "rows.csv", "rows.jsonl"])
def test_files_of_every_format_are_predicted_in_order_without_labels(run, rows, tmp_path, name):
    found = scaleray.predict(run, write(rows, tmp_path / name), local=True, batch_size=8)
    assert found.num_rows == 23 and not found.failed
    np.testing.assert_allclose(found.columns["output"], expected(run, rows), rtol=1e-4, atol=1e-6)


def test_files_of_a_folder_are_read_in_the_order_of_their_names(run, rows, tmp_path):
    for name, part in (("b.parquet", rows[10:]), ("a.parquet", rows[:10])):
        write(part, tmp_path / name)
    found = scaleray.predict(run, tmp_path, local=True)
    np.testing.assert_allclose(found.columns["output"], expected(run, rows), rtol=1e-5)


def test_rows_in_memory_are_predicted_as_a_mapping_and_as_a_table(run, rows):
    for data in ({"x": rows}, {"x": torch.from_numpy(rows)}, table_of(rows)):
        np.testing.assert_allclose(scaleray.predict(run, data).columns["output"], expected(run, rows), rtol=1e-5)
    answers = scaleray.load(run).predict({"x": rows})
    np.testing.assert_allclose(answers["output"], expected(run, rows), rtol=1e-5)


def test_rows_go_through_the_workloads_transform_and_collate(run, rows, tmp_path, classes):
    write(rows, tmp_path / "rows.parquet")
    pq.write_table(table_of(10 * rows).rename_columns(["tenths"]), tmp_path / "tenths.parquet")
    for name, workload in (("tenths", classes.Scaled), ("rows", classes.Collated)):
        found = scaleray.predict(run, tmp_path / f"{name}.parquet", workload=workload, local=True)
        np.testing.assert_allclose(found.columns["output"], expected(run, rows), rtol=1e-4, atol=1e-5)
    answers = scaleray.load(run, workload=classes.Scaled).predict({"tenths": 10 * rows})
    np.testing.assert_allclose(answers["output"], expected(run, rows), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_split_of_the_run_is_written_to_a_file(run, tmp_path, ending, capsys, classes):
    out = tmp_path / f"out.{ending}"
    words = ["predict", run, "--split", "val", "--out", str(out), "--local", "--workload", f"{classes.__file__}:Named"]
    assert run_command([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], told["failed"], told["written"]) == (26, 0, {"answers": str(out)})
    written = (
        pq.read_table(out).to_pylist() if ending == "parquet" else [*map(json.loads, out.read_text().splitlines())]
    )
    logits = expected(run, classes.Points().datasets()["val"]["x"])
    assert [row["corner"] for row in written] == logits.argmax(1).tolist()
    assert written[0]["name"] == f"c{written[0]['corner']}"
    assert run_command(words) == 2 and "already exists" in capsys.readouterr().err
    assert run_command([*words, "--overwrite"]) == 0
    assert f"wrote 26 rows to {out}" in capsys.readouterr().out


def test_columns_that_are_kept_stand_beside_the_answers(run, rows, tmp_path, classes):
    data = tmp_path / "rows.parquet"
    pq.write_table(table_of(rows, id=pa.array([f"row {n}" for n in range(23)])), data)
    out = tmp_path / "out.parquet"
    scaleray.predict(run, data, out=out, keep=["id"], local=True, batch_size=10, workload=classes.Named)
    table = pq.read_table(out)
    assert table.column_names == ["id", "corner", "name"]
    assert table["id"].to_pylist()[-1] == "row 22"
    with pytest.raises(DataError, match=r"(?s)--keep is nr: .*there are: x, id"):
        scaleray.predict(run, data, keep=["nr"], local=True)


def test_rows_that_fail_are_named_and_left_out_where_that_is_asked_for(run, rows, tmp_path, classes, capsys):
    rows[[3, 17]] = 99
    data = write(rows, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"row 3: ValueError: a point outside of the room"):
        scaleray.predict(run, data, local=True, workload=classes.Picky, batch_size=8)
    found = scaleray.predict(run, data, local=True, workload=classes.Picky, batch_size=8, skip_failed=True)
    assert list(found.failed) == [3, 17] and len(found.columns["corner"]) == 21
    words = ["--local", "--skip-failed", "--workload", f"{classes.__file__}:Picky", "--batch-size", "8"]
    assert run_command(["predict", run, "--data", str(data), "--out", str(tmp_path / "o.jsonl"), *words]) == 0
    told = capsys.readouterr()
    assert "wrote 21 rows of 23; 2 failed and were omitted" in told.out and "omitted: row 17 (from 0)" in told.err


def test_a_row_with_a_null_is_one_that_fails(run, tmp_path):
    columns = {f"x_{n}": pa.array([0.5, None if n == 2 else 1.5, 2.5]) for n in range(4)}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    found = scaleray.predict(run, tmp_path / "rows.parquet", local=True, skip_failed=True)
    assert list(found.failed) == [1] and "column x_2" in found.failed[1] and "1 null: " in found.failed[1]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Twice", "its loss\\(\\) calls the model 2 times"),
        ("InParts", "its loss\\(\\) calls a part or a method of the model"),
        ("LabelsFirst", "its loss\\(\\) fails on these columns"),
        ("Short", "corner: shape \\[22\\]"),
    ],
)
def test_answers_that_cannot_be_told_ask_for_predict(run, rows, classes, name, says):
    data = {"x": rows, "y": np.zeros(23, dtype=np.int64)} if name in ("Twice", "InParts") else {"x": rows}
    with pytest.raises(WorkloadError, match=says):
        scaleray.predict(run, data, workload=getattr(classes, name))


def test_an_error_of_the_first_rows_shows_the_users_own_line(run, rows, classes):
    with pytest.raises(WorkloadError, match=r"(?s)failed while predicting a batch.*points.py.*outside of the room"):
        scaleray.predict(run, {"x": rows + 100}, workload=classes.Picky)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "use either --data or --split"),
        ({"data": "nothing.parquet"}, "does not exist"),
        ({"data": "points.txt"}, "no file with a known extension"),
        ({"split": "test"}, "the run has the splits train, val"),
        ({"data": {"x": [[1.0]]}, "out": "a.txt"}, "must end in .parquet or .jsonl"),
        ({"data": 3}, "it must be a path, a mapping of arrays"),
    ],
)
def test_bad_input_is_one_message(run, tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "points.txt").write_text("1")
    with pytest.raises(UsageError, match=says):
        scaleray.predict(run, **options)


def test_a_file_that_cannot_be_finished_is_not_there(run, rows, tmp_path, classes):
    rows[20] = 99
    data, out = write(rows, tmp_path / "rows.parquet"), tmp_path / "out.parquet"
    with pytest.raises(DataError, match="row 20"):
        scaleray.predict(run, data, out=out, local=True, workload=classes.Picky, batch_size=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.parquet"]


@pytest.mark.ray
def test_actors_predict_what_one_process_does_in_the_same_order(ray_session, run, tmp_path, classes):
    rows = np.random.default_rng(2).normal(size=(400, 4)).astype(np.float32)
    rows[77] = 99
    data = tmp_path / "rows.parquet"
    pq.write_table(table_of(rows, id=pa.array(np.arange(400))), data, row_group_size=37)
    options = {"keep": ["id"], "workload": classes.Picky, "skip_failed": True, "batch_size": 16}
    here = scaleray.predict(run, data, local=True, **options)
    there = scaleray.predict(run, data, workers=2, **options)
    assert list(here.failed) == list(there.failed) == [77]
    for name in ("id", "corner"):
        assert np.array_equal(here.columns[name], there.columns[name])
    split = scaleray.predict(run, split="val", workers=2, batch_size=5)
    assert np.allclose(split.columns["output"], expected(run, classes.Points().datasets()["val"]["x"]), rtol=1e-5)
    with pytest.raises(DataError, match="row 77: "):
        scaleray.predict(run, data, **{**options, "skip_failed": False})


@pytest.mark.combination
def test_a_folder_of_images_is_predicted_with_the_names_of_its_files_and_evaluated_where_it_has_classes(
    tmp_path, mlflow_database, capsys
):
    from small_images import Small, write_images

    data = {"train": str(write_images(tmp_path / "train", 8))}
    config = {
        "workload.args": {"data": data, "size": 8, "flip": False, "crop": None},
        "batch.global_size": 4,
        "optimizer.learning_rate": 0.02,
        "stop.after": "40 epochs",
        "checkpoint.storage_path": str(tmp_path / "runs"),
        "tracking": {"uri": f"sqlite:///{mlflow_database}", "system_metrics": False},
    }
    run = scaleray.train(config, Small, local=True, progress=False).run_dir
    (tmp_path / "new").mkdir()
    for name, source in (("x.png", "cat/0.png"), ("y.png", "dog/1.png")):
        (tmp_path / "new" / name).write_bytes((tmp_path / "train" / source).read_bytes())
    out = tmp_path / "answers.jsonl"
    assert run_command(["predict", run, "--data", str(tmp_path / "new"), "--out", str(out), "--local"]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["file"], row["class"]) for row in found] == [(str(tmp_path / "new" / n), c) for n, c in (("x.png", "cat"), ("y.png", "dog"))]  # fmt: skip
    assert scaleray.evaluate(run, data=tmp_path / "train", local=True, record=False).metrics["data/accuracy"] == 1
    with pytest.raises(DataError, match="column labels of"):
        scaleray.evaluate(run, data=tmp_path / "new", local=True, record=False)
    with pytest.raises(DataError, match="there are: id, file"):
        scaleray.predict(run, tmp_path / "new", keep=["name"], local=True)


def test_with_a_config_its_workload_answers_with_the_weights_of_the_run(run, rows, tmp_path):
    config, out = tmp_path / "points.yaml", tmp_path / "answers.parquet"
    name = json.loads(Path(run, "run.json").read_text())["config"]["workload"]["name"].replace(":Points", ":Named")
    config.write_text(f"workload: {{name: '{name}'}}\nbatch: {{global_size: 8}}\nstop: {{after: 1 epochs}}\n"
                      "optimizer: {learning_rate: 0.1}\n")  # fmt: skip
    write(rows, tmp_path / "rows.parquet")
    words = ["predict", "-c", str(config), "--data", str(tmp_path / "rows.parquet"), "--out", str(out), "--local"]
    assert run_command([*words, "--weights", run]) == 0
    assert pq.read_table(out).column("corner").to_pylist() == expected(run, rows).argmax(1).tolist()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-c", "a.yaml"], "--weights is required with -c"),
        (["a", "-c", "a.yaml", "--weights", "b"], "the config gives the workload"),
        ([], "Give a RUN, or models:/NAME@ALIAS."),
    ],
)
def test_a_prediction_of_nothing_or_of_two_things_says_what_to_give(words, message, capsys):
    assert run_command(["predict", *words, "--data", "x.parquet", "--out", "y.parquet"]) == 2
    assert message in capsys.readouterr().err
