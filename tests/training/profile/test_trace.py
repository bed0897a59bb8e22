"""Traces of real trainings: the weights stay the same to the bit, and the traces say what the training did."""

import gzip

import pytest
import torch
from small_runs import Classify, make_job, train_job
from torch import nn

from scaleray.common.watchers import Guard, Watcher
from scaleray.errors import ConfigError
from scaleray.profiling.traces.trace import read_trace
from scaleray.profiling.traces.trace_report import ranks_of, report_on
from scaleray.records.worker_requests import TraceRequest, trace_request
from scaleray.training.profile import trace_recording as tracing
from scaleray.training.profile.memory_snapshot import as_json
from scaleray.training.profile.trace_recording import expected_bytes, named_parts
from scaleray.training.setup.rank_context import RankContext

FLAGS = {"stop.after": "8 steps", "optimizer.name": "adamw", "batch.micro_size": 4, "deterministic": True}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, rows):
        return rows + self.narrow(torch.tanh(self.wide(rows)))


class Blocks(Classify):
    """Two repeated blocks between a layer and a head."""

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 6), nn.Sequential(Block(), Block()), nn.Linear(6, 3))


def run(place, folder, request, flags=FLAGS):
    """One training, traced or not; the weights and what was said."""
    job, sources = make_job(Blocks(), flags, world_size=place.world_size)
    if request is not None:
        object.__setattr__(job, "trace", request.into(folder))
    finished = train_job(place, job, sources)
    torch.use_deterministic_algorithms(False)
    return finished.weights, finished.events


def read_folder(folder):
    traces = []
    for path in sorted((folder / "traces").glob("rank*.json.gz")):
        with gzip.open(path) as file:
            traces.append(read_trace(file, path.name))
    return ranks_of(traces)


@pytest.mark.always("ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_traced_ranks_train_the_same_weights_and_their_traces_close_and_meet(gloo, tmp_path, strategy):
    flags = {**FLAGS, "strategy.name": strategy}
    plain = gloo.run(2, run, str(tmp_path), None, flags)
    traced = gloo.run(2, run, str(tmp_path), TraceRequest((0, 1), slowest=False), flags)
    for (weights, _), (expected, _) in zip(traced, plain, strict=True):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    traces = read_folder(tmp_path)
    found = report_on(traces)
    assert [rank.rank for rank in found.ranks] == [0, 1] and found.world_size == 2
    assert found.num_meetings > 0 and found.clocks.found_from == "barriers" and len(found.late_ns) == 2
    for rank in found.ranks:
        assert rank.partition.num_steps == 2 and rank.partition.closes_within <= 0.01
        assert rank.overlap is not None and rank.flops > 0
        assert {"0", "1.0", "1.1", "2"} == {module.name for module in rank.modules}
    assert {trace.own["first_step"] for trace in traces.values()} == {6}


def test_of_the_ranks_that_were_asked_for_the_slowest_is_the_one_that_waits_least(gloo, tmp_path):
    request = trace_request("slowest")
    waited = {0: 90.0, 1: 30.0, 2: 50.0}
    assert gloo.run(3, slowest_of, request, waited) == [1, 1, 1]
    gloo.run(2, run, str(tmp_path), request)
    assert len(read_folder(tmp_path)) == 1, "all are traced, one is kept"


def slowest_of(place, request, waited):
    recorder = object.__new__(tracing.TraceRecorder)
    recorder.place, recorder.request = place, request
    return recorder._slowest(waited[place.rank])


def test_the_size_is_said_before_the_steps_and_is_right_within_a_factor_of_three(gloo, tmp_path):
    ((_, events),) = gloo.run(1, run, str(tmp_path), TraceRequest((0,), slowest=False))
    (said,) = [text for text in events if text.startswith("traces: steps 6 to 7 of each chosen rank, about")]
    with gzip.open(tmp_path / "traces" / "rank0.json.gz") as file:
        true_mib = len(file.read()) / 2**20
    assert 1 / 3 < float(said.split("about ")[1].split()[0]) / true_mib < 3


def test_a_trace_that_cannot_be_saved_costs_the_training_nothing(gloo, tmp_path):
    (tmp_path / "traces").write_text("a file where the folder should be")
    request = TraceRequest((0, 1))
    plain = gloo.run(2, run, str(tmp_path), None)
    traced = gloo.run(2, run, str(tmp_path), request)
    assert all(torch.equal(traced[0][0][name], value) for name, value in plain[0][0].items())
    assert any(text.startswith("traces: no longer observed") for text in traced[0][1])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_tracer_that_fails_on_one_rank_leaves_the_others_running(gloo, tmp_path, when):
    plain = gloo.run(2, run, str(tmp_path), None)
    traced = gloo.run(2, run_failing, str(tmp_path), when)
    assert all(torch.equal(traced[1][0][name], value) for name, value in plain[1][0].items())


def run_failing(place, folder, when):
    call = Guard._call

    def failing(self, watcher, look):
        if watcher is not Watcher.TRACES or place.rank == 0:
            return call(self, watcher, look)
        if when == "after":
            look()
        raise RuntimeError("planted")

    Guard._call = failing
    try:
        return run(place, folder, TraceRequest((0, 1)))
    finally:
        Guard._call = call


def test_parts_are_blocks_and_what_stands_beside_them():
    model = Blocks().build_model()
    assert [name for name, _ in named_parts(model)] == ["0", "1.0", "1.1", "2"]
    wrapped = nn.Sequential()
    wrapped.add_module("module", model)
    assert [name for name, _ in named_parts(wrapped)] == ["0", "1.0", "1.1", "2"]
    assert [name for name, _ in named_parts(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))] == ["0", "1"]
    assert expected_bytes(model, 2, 4) > expected_bytes(model, 1, 4) > expected_bytes(model, 1, 2) > 0


def test_ranks_are_named_by_number_and_by_word():
    assert trace_request("2, 0,slowest") == TraceRequest((0, 2), slowest=True, one_a_node=False)
    request = trace_request("0,one-a-node")
    assert request.is_fixed(0, 0) and request.is_fixed(4, 0) and not request.is_fixed(5, 1)
    for wrong in ("-1", "all", "1.5", ""):
        with pytest.raises(ConfigError, match="a comma-separated list of rank numbers, slowest and"):
            trace_request(wrong)


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"--ranks is 5: the ranks of 2 workers are 0 to 1"):
        trace_request("0,5").check_ranks(2)
    trace_request("0,1").check_ranks(2)


def test_a_training_that_is_too_short_for_a_trace_is_refused():
    assert TraceRequest().first_step(6) == 1
    with pytest.raises(ConfigError, match="--steps is 5: tracing needs 6 steps, 3 of them to warm up"):
        TraceRequest().first_step(5)


def test_a_snapshot_of_torch_becomes_json_with_what_is_known_of_its_addresses():
    """As `torch.cuda.memory._snapshot` gives it; its own pickle is never read."""
    import io

    from scaleray.profiling.traces.memory_blocks import read_snapshot

    frames = [{"filename": "model.py", "line": 3, "name": "forward"}] * 9
    blocks = [
        {"size": 512, "requested_size": 500, "address": 64, "state": "active_allocated", "frames": frames},
        {"size": 512, "requested_size": 512, "address": 576, "state": "active_allocated", "frames": []},
        {"size": 1024, "requested_size": 0, "address": 1088, "state": "inactive", "frames": []},
    ]
    values = {"segments": [{"total_size": 2048, "segment_type": "small", "blocks": blocks}], "device_traces": []}
    found = read_snapshot(io.BytesIO(as_json(values, {64: "parameters"}, rank=1)), "memory1.json")
    assert found.by_category() == {"parameters": 512, "activations and others": 512}
    assert (found.rank, found.rounding_bytes, found.stranded_bytes, found.blocks[0].where) == (
        1,
        12,
        1024,
        "model.py:3 forward",
    )


def test_a_trace_on_a_cpu_leaves_torchs_own_log_of_its_start_and_end_out(tmp_path, capfd):
    run(RankContext(), tmp_path, TraceRequest((0,), slowest=False))
    assert (tmp_path / "traces" / "rank0.json.gz").exists()
    assert "USDT" not in capfd.readouterr().err
