"""Cluster files and measured collectives: what they say is what the planner uses, and each slip is one message."""

import pytest

from scaleray.config.hardware.cluster_file import read_cluster_file
from scaleray.config.hardware.measured_collectives import read_measured_tables
from scaleray.errors import ConfigError, UsageError

NCCL_TESTS = """\
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid  9175 on     node-a device  0 [0x00] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid  9176 on     node-a device  1 [0x00] NVIDIA A100-SXM4-80GB
#  Rank  2 Group  0 Pid  5175 on     node-b device  0 [0x00] NVIDIA A100-SXM4-80GB
#  Rank  3 Group  0 Pid  5176 on     node-b device  1 [0x00] NVIDIA A100-SXM4-80GB
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    120.1    8.73   13.10      0    119.9    8.75   13.12      0
     2097152        524288     float     sum      -1    201.5   10.41   15.61      0    200.9   10.44   15.66      0
     4194304       1048576     float     sum      -1    350.0   11.98   17.98      0    349.9   11.99   17.98      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 15.5
"""
FILE = """
gpu: h100
gpus_per_node: 2
num_nodes: 2
network: 8x400G
in_network: true
algorithms: [ring, hierarchical]
collectives: measured.txt
storage_gb_per_s: 50
gpu_mtbf_hours: 50000
price_per_gpu_hour: 2.5
"""


def written(folder, text, name="cluster.yaml"):
    (folder / name).write_text(text)
    return folder / name


def test_a_cluster_file_says_what_the_planner_uses(tmp_path):
    written(tmp_path, NCCL_TESTS, "measured.txt")
    cluster = read_cluster_file(written(tmp_path, FILE))
    assert (cluster.gpu.name, cluster.num_gpus, cluster.network.gb_per_s, cluster.in_network) == ("h100", 4, 400, "all")
    assert cluster.algorithms == ("ring", "hierarchical")
    assert (cluster.storage_gb_per_s, cluster.gpu_mtbf_hours, cluster.price_per_gpu_hour) == (50, 50000, 2.5)
    (table,) = cluster.measured
    assert (table.num_ranks, table.num_nodes) == (4, 2)
    assert table.all_reduce_s(2097152) == pytest.approx(201.5e-6)


def test_csv_holds_tables_of_several_groups(tmp_path):
    path = written(tmp_path, "ranks,nodes,bytes,seconds\n8,1,1e6,1e-4\n8,1,1e3,1e-5\n16,2,1e6,3e-4\n", "measured.csv")
    small, large = read_measured_tables(path)
    assert (small.num_ranks, list(small.message_bytes), large.num_nodes) == (8, [1e3, 1e6], 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu: h100", "num_nodes"),
        ("num_nodes: 2", "gpu"),
        ("[1, 2]", "fields"),
        ("gpu: {", "cannot be read"),
        ("gpu: h100\nnum_node: 2", "did you mean num_nodes"),
        ("gpu: h100\nnum_nodes: many", "integer"),
        ("gpu: h1000\nnum_nodes: 2", "nearest"),
        ("gpu: a10\nnum_nodes: 2", "network"),
        ("gpu: h100\nnum_nodes: 2\nstorage_gb_per_s: -1", "positive"),
        ("gpu: h100\nnum_nodes: 2\nalgorithms: [star]", "ring, tree or both"),
        ("gpu: a100\nnum_nodes: 2\nin_network: true", "switch_sum_gb_per_s"),
        ("gpu: h100\nnum_nodes: 2\nin_network: sometimes", "in_network"),
        ("gpu: h100\nnum_nodes: 2\ncollectives: nowhere.txt", "nowhere.txt"),
    ],
)
def test_a_wrong_cluster_file_is_one_message(tmp_path, text, says):
    with pytest.raises((ConfigError, UsageError), match=says):
        read_cluster_file(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "all_reduce_perf"),
        ("hello", "all_reduce_perf"),
        (NCCL_TESTS.replace("13.10", "6.55"), "of another operation: run all_reduce_perf"),
        (NCCL_TESTS.replace("     sum", "    none"), "of another operation: run all_reduce_perf"),
        ("ranks,nodes,bytes,seconds\n8,1,1e6", "four numbers"),
        ("ranks,nodes,bytes,seconds\n8,1,1e6,0", "positive"),
        ("ranks,nodes,bytes,seconds\n1,1,1e6,1", "two ranks"),
        ("ranks,nodes,bytes,seconds\n", "all_reduce_perf"),
    ],
)
def test_a_wrong_table_is_one_message(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says):
        read_measured_tables(written(tmp_path, text, "measured.txt"))
