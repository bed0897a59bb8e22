"""Callbacks of a workload: when they are called, what they may ask for, and that they change nothing."""

import shutil

import numpy as np
import pytest
import torch
from small_runs import WithDropout, train, train_alone

from scaleray import Callback
from scaleray.errors import StepFailedError, WorkloadError
from scaleray.records.run_record import LoggedFile
from scaleray.training import logged
from scaleray.training.logged import as_pixels

FLAGS = {
    "stop.after": "9 steps", "evaluation.every": "4 steps", "checkpoint.every": "3 steps", "precision.dtype": "fp32",
    "deterministic": True,
}  # fmt: skip


class Diary(Callback):
    """Writes down every call, draws random numbers, and counts steps through interruptions."""

    def __init__(self):
        self.calls, self.count = [], 0

    def note(self, hook, run):
        torch.rand(3), np.random.rand(3)
        self.calls.append((hook, run.step, round(run.epoch, 3), sorted(run.metrics), self.count))

    def on_begin(self, run):
        self.note("begin", run)

    def on_step(self, run):
        self.count += 1
        assert not torch.is_grad_enabled()
        self.note("step", run)

    def on_evaluation(self, run):
        self.note("evaluation", run)

    def on_checkpoint(self, run):
        self.note("checkpoint", run)

    def on_end(self, run):
        self.note("end", run)

    def state_dict(self):
        return {"count": self.count, "tensor": torch.full((2,), float(self.count))}

    def load_state_dict(self, state):
        assert torch.equal(state["tensor"], torch.full((2,), float(state["count"])))
        self.count = state["count"]


class Watched(WithDropout):
    def __init__(self, *callbacks, **args):
        super().__init__(**{"num_val": 10, **args})
        self.given = list(callbacks)

    def callbacks(self):
        return self.given


STEP_METRICS = ["train/grad_norm", "train/learning_rate", "train/loss"]
VAL_METRICS = ["val/accuracy", "val/loss"]


def test_hooks_are_called_in_order_with_step_epoch_and_metrics(tmp_path):
    diary = Diary()
    train_alone(Watched(diary), FLAGS, folder=tmp_path)
    hooks = [(hook, step) for hook, step, *_ in diary.calls]
    steps = [("step", n) for n in range(1, 10)]
    assert hooks == [
        ("begin", 0), *steps[:3], ("checkpoint", 3), steps[3], ("evaluation", 4), *steps[4:6], ("checkpoint", 6),
        *steps[6:8], ("evaluation", 8), steps[8], ("checkpoint", 9), ("evaluation", 9), ("end", 9),
    ]  # fmt: skip
    by_hook = {hook: (epoch, metrics) for hook, _, epoch, metrics, _ in diary.calls}
    assert by_hook["step"] == (2.25, STEP_METRICS) and by_hook["end"] == (2.25, VAL_METRICS)


def test_callbacks_change_no_bit_of_the_training(tmp_path):
    without = train_alone(Watched(), FLAGS)
    watched = train_alone(Watched(Diary(), Logs()), FLAGS, folder=tmp_path)
    assert watched.losses == without.losses
    assert all(torch.equal(watched.weights[name], value) for name, value in without.weights.items())


@pytest.mark.parametrize("kill_at", [4, 8])
def test_their_state_is_part_of_the_checkpoint(tmp_path, kill_at):
    whole, first, again = Diary(), Diary(), Diary()
    train_alone(Watched(whole), FLAGS)
    train_alone(Watched(first), FLAGS, folder=tmp_path, kill_at=kill_at)
    train_alone(Watched(again), FLAGS, folder=tmp_path)
    start = kill_at // 3 * 3
    assert again.calls[0][0] == "begin" and again.calls[0][1] == again.calls[0][-1] == start
    assert [c for c in again.calls if c[0] == "step"] == [c for c in whole.calls if c[0] == "step" and c[1] > start]


class Counts(Callback):
    """Counts in steps of its own on each rank."""

    def __init__(self):
        self.count, self.began_with = 0, None

    def on_begin(self, run):
        self.began_with = self.count

    def on_step(self, run):
        self.count += run.rank + 1

    def state_dict(self):
        return {"count": self.count, "twice": torch.tensor([2.0 * self.count])}

    def load_state_dict(self, state):
        assert state["twice"].item() == 2 * state["count"]
        self.count = state["count"]


class AddsUp(Counts):
    def load_states(self, states):
        self.count = sum(state["count"] for state in states)


def counted(place, kind, folder, kill_at=None):
    callback = kind()
    finished = train(place, Watched(callback), FLAGS, folder=folder, kill_at=kill_at)
    return callback.began_with, [event for event in finished.events if "callback" in event]


@pytest.mark.always("AddsUp-18-0")
@pytest.mark.parametrize(("kind", "on_one", "num_warnings"), [(Counts, 6, 1), (AddsUp, 18, 0)])
def test_every_workers_state_is_kept_and_another_number_of_workers_goes_on_from_all_or_the_first(
    gloo, tmp_path, kind, on_one, num_warnings
):
    gloo.run(2, counted, kind, str(tmp_path), 7)
    shutil.copytree(tmp_path, tmp_path / "again")
    began, warnings = gloo.run(1, counted, kind, str(tmp_path / "again"))[0]
    assert began == on_one and len(warnings) == num_warnings
    assert gloo.run(2, counted, kind, str(tmp_path)) == [(6, []), (12, [])]


def test_a_checkpoint_without_callbacks_can_go_on_with_some(tmp_path):
    train_alone(Watched(), FLAGS, folder=tmp_path, kill_at=4)
    diary = Diary()
    train_alone(Watched(diary), FLAGS, folder=tmp_path)
    assert diary.count == 6


class StopsOn(Callback):
    """One rank asks, in one of its hooks."""

    def __init__(self, rank, hook):
        self.rank, self.hook = rank, hook

    def on_step(self, run):
        if self.hook == "step" and run.step == 5 and run.rank == self.rank:
            run.stop("five are enough")

    def on_evaluation(self, run):
        if self.hook == "evaluation" and run.rank == self.rank:
            run.stop("as good as it gets")


def stopped(place, hook):
    return train(place, Watched(StopsOn(1, hook)), FLAGS)


@pytest.mark.parametrize(("hook", "step", "why"), [("step", 6, "five are enough"), ("evaluation", 4, "as good")])
def test_any_rank_may_ask_for_the_end_and_all_end_after_the_same_step(gloo, hook, step, why):
    outcomes = gloo.run(2, stopped, hook)
    assert {o.summary.steps for o in outcomes} == {step}
    assert all(o.summary.verdict.startswith("ended by a callback: ") and why in o.summary.verdict for o in outcomes)


class Logs(Callback):
    """Logs one of each at evaluations."""

    def on_evaluation(self, run):
        run.log_image("pictures/gray", torch.linspace(0, 1, 12).reshape(3, 4))
        run.log_image("pictures/grid", torch.rand(5, 3, 4, 4))
        run.log_text("notes", f"after {run.step}")
        run.log_table("rows", {"word": ["a", "b"], "number": torch.tensor([1, 2])})
        run.log_table("more", [{"a": 1}, {"b": "x, y"}])


def ranks_files(place):
    finished = train(place, Watched(Logs()), FLAGS)
    return [m for m in finished.messages if isinstance(m, LoggedFile)]


def test_what_they_log_becomes_files_named_after_the_step_on_rank_0_alone(gloo):
    files, others = gloo.run(2, ranks_files)
    assert others == [] and len(files) == 3 * 5
    by_path = {file.path: file for file in files}
    assert by_path["notes/step-00000004.txt"].data == b"after 4"
    assert by_path["rows/step-00000008.csv"].data == b"word,number\na,1\nb,2\n"
    assert by_path["more/step-00000009.csv"].data == b'a,b\n1,\n,"x, y"\n'
    assert by_path["pictures/gray/step-00000004.png"].shape == (3, 4)
    assert by_path["pictures/grid/step-00000004.png"].shape == (8, 12, 3)  # of a tensor, channels come first


class TooMuch(Callback):
    def on_step(self, run):
        run.log_text("long", "x" * 40)
        run.log_text("short", "x" * 8)


def test_what_is_too_large_is_left_out_with_one_warning_each(monkeypatch):
    monkeypatch.setattr(logged, "LARGEST_BYTES", 32)
    monkeypatch.setattr(logged, "MOST_BYTES", 40)
    finished = train_alone(Watched(TooMuch()), FLAGS)
    assert len([m for m in finished.messages if isinstance(m, LoggedFile)]) == 5
    assert len([event for event in finished.events if "left out" in event]) == 2


@pytest.mark.parametrize(
    ("image", "shape"),
    [
        (np.zeros((5, 7)), (5, 7)),
        (np.zeros((5, 7, 3), np.uint8), (5, 7, 3)),
        (torch.zeros(1, 5, 7), (5, 7)),
        (torch.zeros(3, 5, 7, dtype=torch.bfloat16), (5, 7, 3)),
        (np.zeros((3, 2, 5, 7)), None),
        (np.zeros((6, 1, 5, 7)), (10, 21)),
        (np.full((5, 7), 300), None),
        (np.zeros(5), None),
        (torch.ones(4, 4, dtype=torch.bool), (4, 4)),
    ],
)
def test_images_are_taken_in_any_usual_layout_or_refused(image, shape):
    if shape is None:
        with pytest.raises(WorkloadError, match="the image a"):
            as_pixels("a", image)
    else:
        assert as_pixels("a", image).shape == shape


def test_a_grid_shows_every_image_in_order():
    grid = as_pixels("a", torch.stack([torch.full((1, 2, 2), value) for value in (0.2, 0.4, 0.6)]))
    assert grid[::2, ::2].tolist() == [[51, 102], [153, 0]]


class Broken(Callback):
    def on_step(self, run):
        if run.step == 3:
            raise KeyError("no such thing")


class BadName(Callback):
    def on_step(self, run):
        run.log_text("../elsewhere", "x")


@pytest.mark.parametrize(
    ("callbacks", "text"),
    [
        ([Broken()], r"(?s)callback Broken.*on_step\(\) after step 3.*test_callbacks\.py.*no such thing"),
        ([BadName()], r"name of a logged file is '\.\./elsewhere'"),
        ([Diary], r"callbacks\(\) returned 'Diary'"),
        ([object()], r"callbacks\(\) returned object"),
    ],
)
def test_a_slip_in_a_callback_is_an_error_with_file_and_line(callbacks, text):
    with pytest.raises((WorkloadError, StepFailedError), match=text):
        train_alone(Watched(*callbacks), FLAGS)
    torch.use_deterministic_algorithms(False)


class AsksTheModel(Callback):
    """Computes with the model under any strategy, in evaluation mode."""

    def __init__(self):
        self.found = []

    def on_evaluation(self, run):
        x = torch.ones(2, 6, dtype=torch.float64)
        self.found.append(run.on_model(lambda model: model(x)).sum().item())


def asked(place, flags):
    callback = AsksTheModel()
    train(place, Watched(callback), flags)
    return callback.found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_callback_may_compute_with_the_model(gloo, strategy):
    flags = {**FLAGS, "precision.dtype": "fp64", "strategy.name": strategy}
    first, second = gloo.run(2, asked, flags)
    assert len(first) == 3 and first == pytest.approx(second, rel=1e-12) and len(set(first)) == 3


def test_what_is_logged_lies_in_the_run_folder_and_in_mlflow_once(tmp_path, uri):
    from scaleray.config import load_config
    from scaleray.launch.run import train as run
    from scaleray.recording import store

    flags = {
        **FLAGS, "workload.name": "test_callbacks:Watched", "batch.global_size": 8, "scale.workers": 1,
        "optimizer.learning_rate": 0.1, "checkpoint.storage_path": str(tmp_path), "tracking.uri": uri,
        "checkpoint.save_final": False, "tracking.system_metrics": False,
    }  # fmt: skip
    record = run.train(load_config(flags=flags, environ={}), Watched(Logs(), Figures()), local=True)
    torch.use_deterministic_algorithms(False)
    (folder,) = tmp_path.glob("*/logged")
    from PIL import Image

    assert Image.open(folder / "pictures/grid/step-00000008.png").size == (12, 8)
    assert Image.open(folder / "drawn/step-00000009.png").size[0] > 50
    client = store.open_client(uri)
    names = [file.path for file in client.list_artifacts(record.run_id, "logged/pictures/gray")]
    assert names == [f"logged/pictures/gray/step-0000000{n}.png" for n in (4, 8, 9)]


class Figures(Callback):
    def on_end(self, run):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(2, 1))
        figure.subplots().plot([1, 2, 3])
        run.log_figure("drawn", figure)
