"""A promoted model answers for rows of a file over Ray Data, with the workload of a config."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scaleray
from scaleray.cli.main import run_command
from scaleray.release.promote.promote import promote
from tests.release.promote.conftest import POLICY


@pytest.mark.combination
@pytest.mark.ray
@pytest.mark.combination
def test_the_champions_weights_answer_through_the_workload_of_a_config_over_ray_data(
    ray_session, sides, tmp_path, monkeypatch
):
    candidates, baselines, uri = sides
    found = promote(candidates, "champion", against=baselines, policy=POLICY, uri=uri)
    assert found.version == 1, found.not_passed
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    rows = np.random.default_rng(3).normal(size=(200, 4)).astype(np.float32)
    columns = {"id": pa.array(range(200)), "x": pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), 4)}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=30)
    name = json.loads(Path(candidates[0], "run.json").read_text())["config"]["workload"]["name"]
    config, out = tmp_path / "job.yaml", tmp_path / "answers.parquet"
    config.write_text(
        f"workload: {{name: '{name}'}}\nbatch: {{global_size: 8}}\nstop: {{after: 1 epochs}}\n"
        "optimizer: {learning_rate: 0.1}\n"
    )
    words = ["predict", "-c", str(config), "--weights", "models:/corners@champion", "--data"]
    words += [str(tmp_path / "rows.parquet"), "--out", str(out), "--workers", "2", "--keep", "id"]
    assert run_command(words) == 0
    answers, own = pq.read_table(out), scaleray.load(candidates[0]).predict({"x": rows})
    assert answers.column("id").to_pylist() == list(range(200)), "in the order of the rows"
    assert answers.column("corner").to_pylist() == own["corner"].tolist()
    assert answers.column("name").to_pylist() == own["name"]
