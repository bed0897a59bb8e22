"""Published measurements as questions: rows as their files hold them, read with the right layout, time and machine, or refused with a reason.

The rows are short copies of published ones, each with its source; the folder of all of them is not part of the repository.
"""

import json
import math
from dataclasses import replace

import pytest

from jobs.planner_evidence.fit import FIRST_GUESSES, Losses, fit, leave_one_source_out, spreads
from jobs.planner_evidence.pollux import fit_pollux
from jobs.planner_evidence.published import observations, read_folder
from jobs.planner_evidence.validate import judge, quantile, score, scores
from scaleray.errors import DataError

GPT_22B = {"name": "GPT 22B", "layers": 48, "hidden": 6144, "heads": 64, "ffn": 24576, "vocab": 51200, "seq_len": 2048}
A100_NODE = {"gpu": "A100 80GB SXM", "gpus": 8, "gpus_per_node": 8, "intra_node": "NVLink3/NVSwitch"}
# arXiv:2205.05198 table 5 by way of Calculon
KORTHIKANTI = {
    "id": "k-0", "family": "tp_pp", "model": GPT_22B, "hardware": A100_NODE, "verified": False, "verified_secondary": True,
    "parallelism": {"strategy": "TP x PP", "tp": 8, "pp": 1, "dp": 1, "activation_checkpointing": "full", "micro_batch": 4, "global_batch_seqs": 4, "precision": "fp16"},
    "measured": {"step_time_s": 1.42},
}  # fmt: skip
LLAMA = {
    "name": "Llama 2 13B",
    "layers": 40,
    "hidden": 5120,
    "heads": 40,
    "ffn": 13824,
    "vocab": 32000,
    "seq_len": 4096,
}
# torchtitan's benchmark of 64 A100, tokens per second and GPU
TORCHTITAN = {
    "id": "t-0", "family": "fsdp_transformer", "model": LLAMA, "hardware": {"gpu": "A100 80GB", "gpus_per_node": 8, "gpus": 64}, "verified": True,
    "parallelism": {"strategy": "FSDP2", "dp": 64, "tp": 1, "pp": 1, "precision": "bf16", "activation_checkpointing": "none", "micro_batch": 2, "global_batch_seqs": 128},
    "measured": {"tokens_per_s_per_gpu": 2162, "mfu_percent": 61.1},
}  # fmt: skip
# Pollux's T4 trace of BERT: placement, batch, step time and the time of the all-reduce (github.com/petuum/adaptdl, osdi21 artifact)
TRACE = {
    "table": "bert", "family": "ethernet", "verified": True,
    "model": {"name": "BERT-base fine-tuning SQuAD v1.1", "params": 109e6, "layers": 12, "hidden": 768, "heads": 12, "seq_len": 384, "optimizer": "AdamW", "precision": "fp32"},
    "hardware": {"gpu": "T4 16GB", "gpus_per_node": 4, "intra_node": "PCIe Gen3 (no NVLink)", "inter_node": "50 Gb/s Ethernet (TCP)", "inter_node_gbit_per_node": 50},
    "parallelism": {"strategy": "PyTorch DDP"},
    "columns": ["placement", "num_nodes", "num_replicas", "local_bsz", "step_time_s", "sync_time_s"],
    "rows": [["1", 1, 1, 4, 0.4553, 0.0137], ["1", 1, 1, 8, 0.7033, 0.014], ["2", 1, 2, 4, 0.473, 0.055], ["4", 1, 4, 4, 0.533, 0.122], ["4", 1, 4, 8, 0.741, 0.092],
             ["22", 2, 4, 4, 1.9491, 1.5495], ["111", 3, 3, 4, 1.111, 0.711], ["1111", 4, 4, 4, 1.186, 0.788], ["1111", 4, 4, 8, 1.308, 0.66], ["134", 3, 8, 4, 1.395, 0.996],
             ["44", 2, 8, 4, 2.4859, 2.0862], ["2222", 4, 8, 4, 1.414, 1.015], ["2222", 4, 8, 8, 1.586, 0.883]],
}  # fmt: skip
# NVIDIA DeepLearningExamples, ResNet-50 v1.5 in PyTorch: images per second
EXAMPLES = {
    "table": "resnet", "family": "ddp_cnn", "verified": True, "model": {"name": "ResNet-50 v1.5", "params": 25557032, "image": 224},
    "hardware": {"system": "DGX-1 16GB (8x V100 16GB)"}, "parallelism": {"strategy": "data parallel", "framework": "PyTorch"},
    "columns": ["GPUs", "Throughput - FP32", "Throughput - mixed precision", "Mixed Precision Strong Scaling"], "rows": [[1, 367, 1200, 1.0], [8, 2855, 8322, 6.93]],
}  # fmt: skip
BROKEN = [
    {"id": "b-0", "family": "convergence", "verified": True, "model": {}, "measured": {"perplexity": 1}},
    {**KORTHIKANTI, "id": "b-1", "parallelism": {**KORTHIKANTI["parallelism"], "dp": 3}},
    {**KORTHIKANTI, "id": "b-2", "hardware": {"gpu": "Abacus 9", "gpus": 8}},
    {**KORTHIKANTI, "id": "b-3", "measured": {"step_time_s": 1.42, "hardware_tflops_per_gpu": 10}},
    {**KORTHIKANTI, "id": "b-4", "verified_secondary": False},
    {"id": "b-5", "family": "tp_pp", "verified": True},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("published")
    for name, records, tables in (
        ("korthikanti", [KORTHIKANTI, *BROKEN], []),
        ("torchtitan", [TORCHTITAN], []),
        ("traces", [], [TRACE]),
        ("examples", [], [EXAMPLES]),
    ):
        (found / f"{name}.json").write_text(
            json.dumps({"schema_version": 1, "source": {}, "records": records, "tables": tables})
        )
    return found


@pytest.fixture(scope="module")
def asked(folder):
    return observations(read_folder(folder))


def test_every_row_is_asked_or_skipped_with_a_reason(folder, asked):
    rows = read_folder(folder)
    seen, skipped = asked
    assert {(row["file"], str(row["id"])) for row in rows} == {(one.source, one.row) for one in (*seen, *skipped)}
    reasons = {one.row: one.reason for one in skipped}
    assert sorted(reasons) == [f"b-{index}" for index in range(len(BROKEN))]
    for row, words in (
        ("b-0", "accuracy"),
        ("b-1", "product"),
        ("b-2", "Abacus"),
        ("b-3", "its own rate"),
        ("b-4", "read in a source"),
        ("b-5", "this model is unknown"),
    ):
        assert words in reasons[row]


def test_layout_machine_and_time_are_those_of_the_row(asked):
    by_row = {one.row: one for one in asked[0]}
    megatron = by_row["k-0"]
    assert (megatron.layout.tensor, megatron.layout.checkpointing, megatron.step_time_s, megatron.cluster.gpu.name) == (
        8,
        "full",
        1.42,
        "a100-80",
    )
    assert not megatron.fused_attention and megatron.layout.accumulation == 1
    titan = by_row["t-0"]
    assert (titan.layout.sharding, titan.layout.data, titan.cluster.num_nodes) == ("zero3", 64, 8)
    assert titan.step_time_s == pytest.approx(128 * 4096 / (64 * 2162))
    trace = by_row["bert:9"]
    assert (trace.cluster.num_nodes, trace.num_gpus, trace.cluster.network.transport) == (3, 8, "tcp")
    examples = [one for one in asked[0] if one.source == "examples"]
    assert len(examples) == 4 and {one.layout.precision for one in examples} == {"fp32", "fp16"}
    assert examples[-1].step_time_s == pytest.approx(8 * 256 / 8322)


def test_the_planner_beats_constant_throughput_on_a_slow_network(asked):
    judged = judge(asked[0])
    trace = score("traces", [one for one in judged if one.seen.source == "traces"])
    assert trace.num_bending >= 6
    assert trace.bending_mean < trace.bending_trivial_mean / 3
    assert trace.pollux_median is not None


def test_an_anchor_is_not_judged_on_itself(asked):
    judged = judge(asked[0], with_pollux=False)
    smallest = [one for one in judged if one.seen.is_trace and one.seen.num_gpus == 1]
    assert smallest and all(one.anchored_s is None for one in smallest)
    assert all(one.anchored_s for one in judged if one.seen.is_trace and one.seen.num_gpus > 1)


def test_scores_of_parts_have_the_rows_of_the_whole(asked):
    judged = judge(asked[0], with_pollux=False)
    lines = scores(judged, lambda one: one.seen.source)
    assert sum(line.num_rows for line in lines) == score("all", judged).num_rows == len(asked[0])
    assert [line.name for line in lines] == sorted(line.name for line in lines)
    assert quantile([1, 2, 3], 0.5) == 2 and quantile([], 0.5) is None and quantile([0, 10], 0.9) == 9


def test_pollux_fits_traces_that_its_own_formula_made():
    points = []
    for nodes, replicas in ((1, 1), (1, 2), (1, 4), (2, 4), (2, 8), (3, 8)):
        for batch in (8, 32, 128):
            net = (
                0.0
                if replicas == 1
                else (0.02 if nodes == 1 else 0.1) + (0.002 if nodes == 1 else 0.01) * (replicas - 2)
            )
            points.append((nodes, replicas, batch, ((0.01 + 0.002 * batch) ** 2 + net**2) ** 0.5))
    model = fit_pollux(points)
    errors = [abs(math.log(model.step_time_s(*point[:3]) / point[3])) for point in points]
    assert quantile(errors, 0.5) < 0.02


def test_a_fit_lowers_its_loss_and_is_the_same_twice(asked):
    names = ("leak", "straggler_share")
    found = fit(asked[0], names=names, rounds=1)
    assert found.loss <= found.start_loss
    assert fit(asked[0], names=names, rounds=1) == found
    kept = {name: getattr(found.constants, name) for name in FIRST_GUESSES.__dataclass_fields__ if name not in names}
    assert all(value == getattr(FIRST_GUESSES, name) for name, value in kept.items())


def test_leaving_sources_out_judges_every_row_once(asked):
    few = [one for one in asked[0] if one.source in ("korthikanti", "torchtitan")]
    judged = leave_one_source_out(few, rounds=1)
    assert sorted(one.seen.row for one in judged) == ["k-0", "t-0"]
    assert set(spreads(judged)) == {"unmeasured"}


def test_a_source_that_is_left_out_has_no_say_and_what_is_remembered_is_what_would_be_found(asked):
    losses = Losses(asked[0])
    slower = replace(FIRST_GUESSES, matmul_practice=0.7)
    for source in {one.source for one in asked[0]}:
        others = [one for one in asked[0] if one.source != source]
        for constants in (FIRST_GUESSES, slower, FIRST_GUESSES):
            assert losses(constants, without=source) == Losses(others)(constants)
    assert losses(slower) != losses(FIRST_GUESSES)


@pytest.mark.parametrize("text", ["[", "{}", "[]", '{"records": [], "tables": [{"columns": ["a"]}]}'])
def test_a_file_in_another_format_is_one_message(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(DataError, match=r"bad\.json"):
        read_folder(tmp_path)


def test_a_row_without_a_cell_for_each_column_is_skipped_alone(tmp_path):
    table = {**TRACE, "rows": [TRACE["rows"][0], [1, 2]]}
    (tmp_path / "trace.json").write_text(json.dumps({"tables": [table]}))
    seen, skipped = observations(read_folder(tmp_path))
    assert len(seen) == 1 and [one.reason for one in skipped] == [
        "the row is ragged: it must have a cell for each column of its table."
    ]


def test_an_empty_folder_is_one_message(tmp_path):
    with pytest.raises(DataError, match="JSON files"):
        read_folder(tmp_path)


def test_memory_without_a_batch_is_not_judged_and_listed(tmp_path):
    row = {
        "id": "m-0",
        "family": "ddp_transformer",
        "verified": True,
        "model": {"name": "about 1B"},
        "hardware": {"gpu": "H100", "gpus": 8},
        "parallelism": {"strategy": "pure data parallel", "dp": 8},
        "measured": {"tokens_per_s_per_gpu": 4e4, "memory_gb": 36.7},
    }
    (tmp_path / "one.json").write_text(json.dumps({"records": [row]}))
    seen, skipped = observations(read_folder(tmp_path))
    assert [one.memory_bytes for one in seen] == [None] and seen[0].step_time_s
    assert ["memory is not judged" in one.reason for one in skipped] == [True]
