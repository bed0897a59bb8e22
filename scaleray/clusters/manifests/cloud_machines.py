"""Machines with GPUs in the clouds: hardware of a node, and its name in each system.

Sizes and names follow the providers' pages, recalled from memory; no machine was rented to check them.
"""

from dataclasses import dataclass

from scaleray.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One type of node. gpu: name in the planner's catalogue. product: name in NVIDIA's feature discovery on
    Kubernetes. aws, gcp: instance type, None if the cloud has none. sky: SkyPilot's name of the accelerator."""

    gpu: str
    gpus: int
    cpus: int
    memory_gib: int
    product: str
    sky: str
    aws: str | None = None
    gcp: str | None = None


MACHINES = (
    Machine(gpu="b200", gpus=8, cpus=192, memory_gib=2048, product="NVIDIA-B200", sky="B200",
        aws="p6-b200.48xlarge", gcp="a4-highgpu-8g"),
    Machine(gpu="h200", gpus=8, cpus=192, memory_gib=2048, product="NVIDIA-H200", sky="H200",
        aws="p5en.48xlarge", gcp="a3-ultragpu-8g"),
    Machine(gpu="h100", gpus=8, cpus=192, memory_gib=1872, product="NVIDIA-H100-80GB-HBM3", sky="H100",
        aws="p5.48xlarge", gcp="a3-highgpu-8g"),
    Machine(gpu="a100-80", gpus=8, cpus=96, memory_gib=1152, product="NVIDIA-A100-SXM4-80GB", sky="A100-80GB",
        aws="p4de.24xlarge", gcp="a2-ultragpu-8g"),
    Machine(gpu="a100-40", gpus=8, cpus=96, memory_gib=680, product="NVIDIA-A100-SXM4-40GB", sky="A100",
        aws="p4d.24xlarge", gcp="a2-highgpu-8g"),
    Machine(gpu="l40s", gpus=8, cpus=192, memory_gib=1536, product="NVIDIA-L40S", sky="L40S", aws="g6e.48xlarge"),
    Machine(gpu="l40s", gpus=4, cpus=48, memory_gib=384, product="NVIDIA-L40S", sky="L40S", aws="g6e.12xlarge"),
    Machine(gpu="l4", gpus=8, cpus=96, memory_gib=384, product="NVIDIA-L4", sky="L4",
        aws="g6.48xlarge", gcp="g2-standard-96"),
    Machine(gpu="l4", gpus=4, cpus=48, memory_gib=192, product="NVIDIA-L4", sky="L4",
        aws="g6.12xlarge", gcp="g2-standard-48"),
    Machine(gpu="l4", gpus=1, cpus=4, memory_gib=16, product="NVIDIA-L4", sky="L4",
        aws="g6.xlarge", gcp="g2-standard-4"),
    Machine(gpu="a10g", gpus=4, cpus=48, memory_gib=192, product="NVIDIA-A10G", sky="A10G", aws="g5.12xlarge"),
    Machine(gpu="a10g", gpus=1, cpus=4, memory_gib=16, product="NVIDIA-A10G", sky="A10G", aws="g5.xlarge"),
    Machine(gpu="t4", gpus=4, cpus=48, memory_gib=192, product="Tesla-T4", sky="T4", aws="g4dn.12xlarge"),
    Machine(gpu="t4", gpus=1, cpus=4, memory_gib=16, product="Tesla-T4", sky="T4", aws="g4dn.xlarge"),
)  # fmt: skip


def machine_of(gpus: str) -> Machine:
    """Return the machine for text such as `8xh100`. Raises UsageError."""
    count, cross, name = gpus.lower().partition("x")
    offered = ", ".join(f"{one.gpus}x{one.gpu}" for one in MACHINES)
    if not (cross and count.isdigit() and name):
        raise UsageError("--gpus", gpus, "it must be a count and a type, such as 8xh100", f"available: {offered}")
    named = [one for one in MACHINES if one.gpu == name or one.gpu.startswith(f"{name}-")]
    for one in named:
        if one.gpus == int(count):
            return one
    if not named:
        raise UsageError("--gpus", gpus, f"no machine with {name} is known", f"available: {offered}")
    counts = " or ".join(f"{one.gpus}x{one.gpu}" for one in named)
    raise UsageError("--gpus", gpus, f"{name} is available as {counts}", "use one of these, and edit the written files")
