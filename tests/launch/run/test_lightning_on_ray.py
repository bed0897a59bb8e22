"""A Lightning job under Ray Train is the training that it is in one process without Ray."""

from pathlib import Path

import pytest
from small_runs import largest_difference

import scaleray
from scaleray.training.state.final_weight_files import read_weights

ROOT = Path(__file__).parents[3]


@pytest.mark.combination
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_the_job_of_a_lightning_module_trains_under_ray_what_one_process_trains(ray_session, tmp_path, uri):
    flags = {
        "workload.args": {"width": 4}, "stop.after": "12 steps", "evaluation.every": "6 steps", "precision.dtype": "fp64",
        "tracking.system_metrics": False, "tracking.uri": uri, "checkpoint.storage_path": str(tmp_path / "runs"),
        "optimizer.learning_rate": 0.01,
    }  # fmt: skip
    load = lambda **more: scaleray.load_config(
        ROOT / "jobs/recipes/lightning_digits.yaml", flags={**flags, **more}, environ={}
    )
    alone = scaleray.train(load(**{"tracking.run_name": "alone"}), base_dir=ROOT, local=True)
    both = scaleray.train(load(**{"scale.workers": 2, "tracking.run_name": "both"}), base_dir=ROOT)
    assert (both.steps, both.workers) == (12, 2)
    # the largest rate of the module's schedule, whose peak is the config's
    assert both.derived["learning_rate"] == alone.derived["learning_rate"] == pytest.approx(0.01, rel=0.02)
    assert both.final_loss == pytest.approx(alone.final_loss, rel=1e-9)
    assert both.metrics == pytest.approx(alone.metrics, rel=1e-9) and "val/acc" in both.metrics
    assert largest_difference(read_weights(both.run_dir), read_weights(alone.run_dir)) < 1e-9
