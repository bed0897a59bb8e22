"""Reports of nodes as a healthy cluster would give them, for tests that spoil one thing."""

from __future__ import annotations

from dataclasses import replace

from scaleray.clusters.doctor.doctor import evaluate
from scaleray.clusters.preflight.check_limits import GIB
from scaleray.records.doctor_record import (
    AllReduceTime,
    ClockSeen,
    DeviceRate,
    DiskSeen,
    GpuSeen,
    LinkRate,
    Links,
    Measured,
    NodeSeen,
    StorageSeen,
)

NAMES = tuple(f"10.0.0.{number}" for number in range(1, 5))
H100 = "NVIDIA H100 80GB HBM3"
PACKAGES = {"scaleray": "0.1.0", "ray": "2.60.0", "torch": "2.13.0", "numpy": "2.3.0", "peft": "0.21.0"}
VERSIONS = {"driver": "570.86", "cuda": "12.8", "cudnn": "91002", "nccl": "2.27.3"}


def gpu(index, **changes):
    return GpuSeen(
        index=index, name=H100, memory_bytes=80 * GIB, used_bytes=2**20, utilisation=0.0, num_nvlinks=18, **changes
    )


def node(name, *, gpus=8, **changes):
    return NodeSeen(
        **{
            "name": name,
            "machine": f"boot of {name}",
            "python": "3.11.7",
            "packages": PACKAGES,
            "accelerators": VERSIONS if gpus else {},
            "gpus": [gpu(index) for index in range(gpus)],
            "torch_gpus": gpus,
            "ray_gpus": float(gpus),
            "limits": {"nofile": 65536, "nproc": None, "memlock": None},
            "has_rdma": True,
            "shm_bytes": 512 * GIB,
            "memory_bytes": 1024 * GIB,
            "object_store_bytes": 200 * GIB,
            "disks": [DiskSeen(use="runs", path="/shared/runs", free_bytes=900 * GIB, total_bytes=1000 * GIB)],
            "port_range": 28232,
            "mlflow_error": "",
            **changes,
        }
    )


def healthy(*, gpus=8, names=NAMES, pair_bytes_per_s=46e9):
    """Everything that is measured on a cluster of H100 with 8 adapters of 400 Gb/s a node, as it should be."""
    precision, kind, rate = ("bf16", H100, 790e12) if gpus else ("fp32", "cpu", 90e9)
    rates = [
        DeviceRate(
            node=name,
            device=f"GPU {index}" if gpus else "a core",
            kind=kind,
            precision=precision,
            flops_per_s=rate * (1 - index / 200),
        )
        for name in names
        for index in range(max(1, gpus))
    ]
    pairs = [
        LinkRate(one=one, other=other, is_between_nodes=True, bytes_per_s=pair_bytes_per_s * (1 + 0.01 * number))
        for number, one in enumerate(names)
        for other in names[number + 1 :]
    ]
    size = 2**28
    inside = (
        [
            AllReduceTime(ranks=gpus, nodes=1, num_bytes=size, seconds=2 * 7 / 8 * size / 360e9, where=name)
            for name in names
        ]
        if gpus > 1
        else []
    )
    ranks = max(1, gpus) * len(names)
    between = [
        AllReduceTime(ranks=ranks, nodes=len(names), num_bytes=size, seconds=2 * (ranks - 1) / ranks * size / 330e9)
    ]
    return Measured(
        nodes=[node(name, gpus=gpus) for name in names],
        has_ray=True,
        storage_path="/shared/runs",
        tracking_uri="http://mlflow:5000",
        clocks=[ClockSeen(node=name, ahead_s=0.001 * number, within_s=0.0005) for number, name in enumerate(names)],
        storage=[StorageSeen(node=name, write_bytes_per_s=1.2e9, read_bytes_per_s=2e9) for name in names],
        rates=rates,
        all_reduces=[*inside, *between],
        links=Links(pairs=pairs, rounds=3, all_rounds=3),
    )  # fmt: skip


def with_node(measured, name, **changes):
    """The measurements with one node that is otherwise."""
    return replace(measured, nodes=[replace(n, **changes) if n.name == name else n for n in measured.nodes])


def found(measured, name):
    """The check of this name."""
    [check] = [check for check in evaluate(measured) if check.name == name]
    return check


def not_green(measured):
    """Names of checks that are red or yellow, with their verdicts."""
    return {check.name: check.verdict for check in evaluate(measured) if check.verdict in ("red", "yellow")}
