"""States of runs for tests of what watches them."""

from __future__ import annotations

import dataclasses
import time

from scaleray.records.alert_record import Alert
from scaleray.records.live_state import RUNNING, LiveState, RankNow, RecentSteps
from scaleray.records.run_description import RunDescription
from scaleray.records.run_record import Heartbeat, StepRecord

ALERT = Alert("straggler", "critical", "firing", 1.0, 0.03, "rank 1 makes the others wait 30 ms a step")


def describe(uri, tmp_path, **more):
    """A run whose folder is `run` below `tmp_path`."""
    values = {
        "tracking_uri": uri,
        "experiment": "tests",
        "run_name": "run",
        "work_dir": str(tmp_path / "run"),
        "every_steps": 1,
        "params": {},
        "tags": {"scaleray.kind": "train"},
        "files": {},
    }
    return RunDescription(**{**values, **more})


def step(number, loss=1.0, **more):
    """One step of 8 samples in half a second."""
    values = {
        "step": number,
        "loss": loss,
        "count": 8.0,
        "num_samples": 8,
        "learning_rate": 0.1,
        "grad_norm": None,
        "step_time_s": 0.5,
        "input_wait_s": 0.1,
        "epoch": number / 10,
        "recorded_at": 1000.0 + number / 2,
    }
    return StepRecord(**{**values, **more})


def beat(rank, *, wait_s=0.0, world_size=2, step=7, **more):
    """A sign of life of a rank that stands still for so long in collectives."""
    phases = {"forward": 0.1, "exposed_communication": wait_s}
    recent = RecentSteps(step, 4, 0.2, {name: s for name, s in phases.items() if s}, {"peak_bytes": 2**30})
    return Heartbeat(rank, f"node-{rank}", 1, step, "forward", 0.1, world_size=world_size, recent=recent, **more)


def live_state(**more):
    """A run of two ranks that trains, with all that a page shows."""
    ranks = [
        RankNow(0, "10.0.0.1", 120, "exposed_communication", 0.01, 0.2, 0.081, 0.0, {"peak_bytes": 3 * 2**30}),
        RankNow(1, "10.0.0.2", 120, "forward", 7.5, 0.4, 0.081, 0.030, {"peak_bytes": 3 * 2**30}),
    ]
    values = {
        "name": "language_model-w002-b64-20261123-201500-ab12",
        "status": RUNNING,
        "run_id": "0123456789abcdef0123456789abcdef",
        "mlflow_link": "http://127.0.0.1:5000/#/experiments/1/runs/0123456789abcdef0123456789abcdef",
        "run_dir": "/home/somebody/scaleray/language_model-w002-b64-20261123-201500-ab12",
        "strategy": "ddp",
        "workers": 2,
        "started_at": time.time() - 90,
        "seen_at": time.time(),
        "step": 120,
        "total_steps": 460,
        "epoch": 5.2,
        "left_s": 200.0,
        "loss": 0.231,
        "learning_rate": 2e-3,
        "grad_norm": 0.31,
        "curve": [(n, 2.3 / n if n != 7 else None) for n in range(1, 120)],
        "step_time_s": 0.081,
        "samples_per_s": 790.0,
        "tokens_per_s": 404_480.0,
        "input_wait_share": 0.012,
        "expected_samples_per_s": 1000.0,
        "metrics": {"val/accuracy": 0.97, "val/loss": 0.1},
        "goodput": 0.87,
        "checkpoint_step": 100,
        "checkpoint_at": time.time() - 12,
        "phases": {"forward": 0.03, "backward": 0.03, "exposed_communication": 0.015, "optimizer": 0.006},
        "ranks": ranks,
        "alerts": [ALERT, dataclasses.replace(ALERT, name="loss_spike", state="resolved", summary="over")],
        "events": ["MLflow accepts no more data at step 100"],
        "waiting_points": 12,
        "attempts": 2,
    }
    return LiveState(**{**values, **more})
