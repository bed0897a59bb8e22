"""Published rows with anything in any field: each is judged or listed with a reason, and none ends the run."""

import copy
import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobs.planner_evidence.published import observations, read_folder
from jobs.planner_evidence.validate import judge, score

MEGATRON = {
    "id": "m", "family": "tp_pp", "verified": True, "model": {"name": "GPT 22B", "layers": 48, "hidden": 6144, "heads": 64, "ffn": 24576, "vocab": 51200, "seq_len": 2048},
    "hardware": {"gpu": "A100 80GB SXM", "gpus": 64, "gpus_per_node": 8, "intra_node": "NVLink3/NVSwitch", "inter_node": "8 x 200 Gb/s HDR InfiniBand"},
    "parallelism": {"strategy": "TP x PP", "tp": 8, "pp": 2, "dp": 4, "activation_checkpointing": "full", "micro_batch": 4, "global_batch_seqs": 64, "precision": "fp16", "interleave": 2},
    "measured": {"step_time_s": 5.0, "memory_gb": 60},
}  # fmt: skip
# NeMo AutoModel's summary of H100 runs: Qwen3 MoE 30B on 8 GPUs
MIXTURE = {
    "id": "x", "family": "moe", "verified": True, "model": {"name": "Qwen3 MoE 30B", "params": 30.5e9, "active_params": 3.3e9, "seq_len": 4096, "experts": 128, "top_k": 8},
    "hardware": {"gpu": "H100 80GB", "gpus": 8, "gpus_per_node": 8}, "measured": {"step_time_s": 21.773, "tokens_per_s_per_gpu": 12040},
    "parallelism": {"strategy": "FSDP2", "dp": 8, "cp": 1, "ep": 8, "micro_batch": 4, "global_batch_seqs": 512, "precision": "bf16"},
}  # fmt: skip
TRACE = {
    "id": "t", "family": "ethernet", "verified": True, "model": {"name": "BERT-base", "params": 109e6, "layers": 12, "hidden": 768, "heads": 12, "seq_len": 384, "precision": "fp32"},
    "hardware": {"gpu": "T4 16GB", "gpus_per_node": 4, "inter_node": "50 Gb/s Ethernet (TCP)"}, "parallelism": {"strategy": "PyTorch DDP"},
    "measured": {"placement": "22", "num_nodes": 2, "num_replicas": 4, "local_bsz": 4, "step_time_s": 1.9, "sync_time_s": 1.5},
}  # fmt: skip
IMAGES = {
    "id": "i", "family": "ddp_cnn", "verified": True, "model": {"name": "ResNet-50 v1.5", "image": 224}, "hardware": {"system": "DGX-1 16GB (8x V100 16GB)"},
    "parallelism": {"framework": "PyTorch"}, "measured": {"GPUs": 8, "Throughput - FP32": 2855, "Throughput - mixed precision": 8322, "Batch size / GPU": "256@FP16, 128@FP32"},
}  # fmt: skip
BASES = [MEGATRON, MIXTURE, TRACE, IMAGES]

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([0, -1, 2**70, 10**400, 1e300, math.nan, math.inf, -0.0, 1e-300]),
    st.sampled_from(
        [
            "",
            " ",
            "none",
            "8 x 0 Gb/s",
            "auto 1.3x (14336)",
            "1,024",
            "0x A100 40GB",
            "GPT-3 0B",
            "H100",
            "TPU v5e",
            "nan",
            "-5",
            "0000",
            "é\n",
            "mixtral",
            "BERT sequence length 0",
            "ResNet-99",
            "FSDP",
            "zero++ 1-bit",
        ]
    ),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.sampled_from(["a", "name"]), st.integers(), max_size=2),
    st.floats(-10, 1e6),
    st.text(max_size=6),
)
FIELDS = ["name", "params", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "experts", "top_k", "active_params", "expert_ffn", "image",
          "gpu", "gpus", "nodes", "gpus_per_node", "inter_node", "inter_node_gbit_per_node", "intra_node", "system",
          "strategy", "framework", "dp", "tp", "pp", "cp", "ep", "micro_batch", "grad_accum", "global_batch_seqs", "local_batch", "precision", "activation_checkpointing",
          "interleave", "schedule", "attention", "sharding", "overlap", "step_time_s", "tokens_per_s", "tflops_per_gpu", "memory_gb", "out_of_memory",
          "placement", "num_replicas", "local_bsz", "GPUs", "device num", "setting", "step_time_ms_iterations_8_to_12"]  # fmt: skip


@st.composite
def odd_rows(draw):
    row = copy.deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 3))):
        part = draw(st.sampled_from(["model", "hardware", "parallelism", "measured", None, "whole"]))
        value = draw(ODD)
        if part is None:
            row[
                draw(
                    st.sampled_from(
                        [
                            "model",
                            "hardware",
                            "parallelism",
                            "measured",
                            "family",
                            "id",
                            "verified",
                            "derived",
                            "digitised",
                        ]
                    )
                )
            ] = value
        elif part == "whole" or not isinstance(row.get(part), dict):
            row.pop(
                draw(st.sampled_from(["model", "hardware", "parallelism", "measured", "family", "id", "verified"])),
                None,
            )
        elif row[part] and draw(st.booleans()):
            row[part][draw(st.sampled_from(sorted(row[part])))] = value
        else:
            row[part][draw(st.sampled_from(FIELDS))] = value
    return row


@settings(max_examples=100, deadline=None)
@given(odd_rows(), st.sampled_from(["rows", "megatron_core_rows", "deepspeed"]))
@example({**MIXTURE, "parallelism": {**MIXTURE["parallelism"], "ep": 3}}, "rows")
@example({**MEGATRON, "model": {**MEGATRON["model"], "heads": 7, "kv_heads": 5}}, "rows")
@example({**MEGATRON, "family": ["tp"]}, "rows")
@example({**TRACE, "model": {**TRACE["model"], "name": []}}, "rows")
def test_any_row_is_judged_or_listed_and_never_ends_the_run(row, file):
    seen, skipped = observations([row | {"file": file}])
    assert seen or skipped
    assert all(one.reason for one in skipped)
    judged = judge(seen, with_pollux=False)
    for one in judged:
        assert one.from_sheets_s is None or (math.isfinite(one.from_sheets_s) and one.from_sheets_s > 0)
        assert one.memory_bytes is None or (math.isfinite(one.memory_bytes) and one.memory_bytes > 0)
    if judged:
        score("all", judged)


def test_the_rows_as_they_are_published_are_all_judged():
    seen, skipped = observations([base | {"file": "rows"} for base in BASES])
    assert not skipped and len(seen) == len(BASES) + 1  # two precisions in the row of images
    mixture = next(one for one in seen if one.row == "x")
    assert (mixture.layout.expert, mixture.model.num_experts) == (8, 128)
    assert judge([mixture])[0].from_sheets_s == pytest.approx(21.773, rel=0.35)


def test_a_record_that_is_no_mapping_costs_no_other(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps({"records": [MEGATRON, 5, None, "x"]}))
    seen, skipped = observations(read_folder(tmp_path))
    assert len(seen) == 1 and len(skipped) == 3
    assert all("fields" in one.reason for one in skipped)
