"""What sources leave unsaid or write in their own way, read as it is meant: batches of pipelines, racks, slices, units, kernels, FLOP counts."""

import copy

import pytest

from jobs.planner_evidence.published import observations
from jobs.planner_evidence.published.fields import number, whole
from jobs.planner_evidence.published.machines import cluster_of, network_of
from scaleray.config.hardware.catalogue import CATALOGUE

# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 5: local batch 32, global batch 256
PIPELINE = {
    "id": "p", "family": "tp_pp", "verified": True, "file": "rows", "model": {"name": "Llama 3.1 405B", "seq_len": 8192},
    "hardware": {"gpu": "H100 96GB", "gpus": 512, "gpus_per_node": 8, "inter_node_gbit_per_gpu": 400}, "measured": {"tokens_per_s_per_gpu": 100},
    "parallelism": {"strategy": "FSDP2 + TP + PP", "dp": 8, "tp": 8, "pp": 8, "precision": "float8", "activation_checkpointing": "full", "micro_batch": 32, "global_batch_seqs": 256},
}  # fmt: skip


def read(row, **parts):
    row = copy.deepcopy(row)
    for part, values in parts.items():
        row[part] = {key: value for key, value in (row.get(part, {}) | values).items() if value is not None}
    seen, skipped = observations([row])
    assert not skipped, skipped
    return seen[0]


def test_a_whole_local_batch_is_cut_by_its_pipeline():
    given = read(PIPELINE)
    assert (given.layout.micro_batch, given.layout.accumulation, given.layout.global_batch) == (4, 8, 256)
    local = read(PIPELINE, parallelism={"micro_batch": None, "local_batch": 32})
    assert local.layout == given.layout
    assert given.step_time_s == pytest.approx(256 * 8192 / (100 * 512))


def test_a_pipeline_gathers_parameters_once_a_step():
    assert read(PIPELINE).layout.sharding == "zero1"
    assert read(PIPELINE, parallelism={"pp": 1, "dp": 64, "micro_batch": 1}).layout.sharding == "zero3"


def test_torchtitans_tensor_parallelism_divides_norms_along_the_sequence():
    assert read(PIPELINE).layout.sequence_parallel
    assert not read(PIPELINE, parallelism={"strategy": "TP x PP"}).layout.sequence_parallel


def test_attention_runs_at_the_rate_of_the_kernel_that_is_named_or_brought():
    usual = read(PIPELINE).cluster.gpu.attention_share
    named = read(PIPELINE, parallelism={"attention": "FA3"}).cluster.gpu.attention_share
    brought = read(PIPELINE, parallelism={"framework": "NeMo"}).cluster.gpu.attention_share
    assert usual < named == brought == CATALOGUE.find_gpu("h100-96").best_attention_share
    # what is named counts, not what the framework would bring
    assert read(PIPELINE, parallelism={"framework": "NeMo", "attention": "FA2"}).cluster.gpu.attention_share == usual


def test_ptd_p_counts_the_pass_that_is_computed_again_and_later_megatron_does_not():
    # Narayanan et al. 2021, table 1: 1008B on 3072 GPUs, 163 TFLOP/s, 44 % of 312 with four passes
    row = {
        "id": "n",
        "family": "tp_pp",
        "verified": True,
        "file": "rows",
        "model": {"name": "GPT 1008B", "layers": 128, "hidden": 25600, "heads": 160, "vocab": 51200, "seq_len": 2048},
        "hardware": {"gpu": "A100 80GB", "gpus": 3072, "gpus_per_node": 8},
        "measured": {"tflops_per_gpu": 163},
        "parallelism": {
            "strategy": "PTD-P",
            "tp": 8,
            "pp": 64,
            "dp": 6,
            "micro_batch": 1,
            "global_batch_seqs": 3072,
            "precision": "fp16",
            "activation_checkpointing": "full",
        },
    }
    # the paper's formula, arXiv:2104.04473, equation 3: 96 B s l h^2 (1 + s/6h + V/16lh)
    flops = 96 * 3072 * 2048 * 128 * 25600**2 * (1 + 2048 / (6 * 25600) + 51200 / (16 * 128 * 25600))
    assert read(row).step_time_s == pytest.approx(flops / (163e12 * 3072), rel=0.01)
    later = read(row, parallelism={"strategy": "TP x PP x DP"})
    assert later.step_time_s == pytest.approx(0.75 * read(row).step_time_s)


def test_expert_ranks_beside_the_replicas_share_out_their_batch():
    row = {
        **PIPELINE,
        "model": {"name": "Mixtral 8x7B", "seq_len": 4096},
        "hardware": {"gpu": "H200", "gpus": 32, "gpus_per_node": 4},
    }
    shares = {"dp": 4, "tp": 4, "pp": 1, "ep": 2, "micro_batch": 8, "global_batch_seqs": None, "grad_accum": 1}
    beside = read(row, parallelism=shares)
    assert (beside.layout.data, beside.layout.expert, beside.layout.global_batch) == (8, 2, 32)
    among = read(row, parallelism=shares | {"dp": 8, "micro_batch": 4})
    assert among.layout == beside.layout


def test_part_of_a_rack_is_the_same_part_of_each():
    rack = cluster_of({"gpu": "GB200", "gpus": 256})
    assert (rack.gpus_per_node, rack.num_nodes, rack.num_gpus) == (64, 4, 256)
    assert cluster_of({"gpu": "GB200", "gpus": 72}).num_nodes == 1


def test_chips_of_a_slice_are_one_node_whatever_hosts_they_sit_on():
    assert cluster_of({"gpu": "TPU v5e", "gpus": 256, "gpus_per_node": 4}).num_nodes == 1
    two = cluster_of({"gpu": "TPU v5p-128", "gpus": 128, "slices": 2})
    assert (two.gpus_per_node, two.num_nodes) == (64, 2)
    sliced = read(
        PIPELINE,
        hardware={"gpu": "TPU v5e", "gpus_per_node": None},
        parallelism={"tp": 1, "pp": 1, "dp": 512, "micro_batch": 1, "strategy": "FSDP"},
    )
    assert sliced.layout.shard == 256


def test_eight_in_a_node_of_mi250x_are_dies():
    assert cluster_of({"gpu": "MI250X", "gpus": 64, "gpus_per_node": 8}).gpu.name == "mi250x-gcd"
    assert cluster_of({"gpu": "MI250X (one GCD)", "gpus": 64}).gpu.name == "mi250x-gcd"
    assert cluster_of({"gpu": "MI250X (per package)", "gpus": 64}).gpu.name == "mi250x"


@pytest.mark.parametrize(
    ("text", "gb_per_s", "transport"),
    [
        ("RoCE, 400 Gb/s per GPU", 400, "rdma"), ("3.2 Tb/s EFA", 400, "efa"), ("100 GbE TCP", 12.5, "tcp"), ("8x400G", 400, "rdma"),
        ("25 Gbps Ethernet", 3.125, "tcp"), ("InfiniBand, 50 GB/s per node", 50, "rdma"), ("Slingshot 11, 4 x 200 Gb/s per node", 100, "rdma"),
    ],
)  # fmt: skip
def test_a_network_is_read_in_any_unit(text, gb_per_s, transport):
    found = network_of({"inter_node": text, "gpus_per_node": 8}, CATALOGUE.find_gpu("h100"), 8)
    assert (found.gb_per_s, found.transport) == (gb_per_s, transport)


def test_numbers_are_read_from_texts_and_slips_are_none():
    fields = {
        "a": "auto 1.3x (14336)",
        "b": "1,024",
        "c": -3,
        "d": float("nan"),
        "e": [4],
        "f": True,
        "g": 10**400,
        "h": 0.4,
    }
    assert [number(fields, name) for name in "abcdefg"] == [14336, 1024, None, None, None, None, None]
    assert whole(fields, "missing", "b") == 1024 and whole(fields, "h") == 1
