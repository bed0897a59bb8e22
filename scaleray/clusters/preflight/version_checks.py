"""Check whether all nodes have the same Python, packages and drivers.

Ray pickles between processes and rejects other versions of itself, and torch's ranks must agree on their messages.
Other differences are only reported."""

from collections.abc import Mapping, Sequence

from scaleray.clusters.preflight.check_texts import by_value, minority, node_list, together
from scaleray.records.doctor_record import Measured, NodeSeen, PreflightCheck

MUST_BE_EQUAL = ("scaleray", "ray", "torch")
"""Packages whose version, if it differs between nodes, makes a run fail or changes the training."""
WATCHED = (
    *MUST_BE_EQUAL, "numpy", "pyarrow", "pydantic", "mlflow", "mlflow-skinny", "safetensors", "lightning",
    "transformers", "peft", "tokenizers", "torchvision", "timm", "torchmetrics", "datasets", "accelerate", "triton",
    "nvidia-nccl-cu12", "nvidia-cudnn-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu13",
)  # fmt: skip
"""Packages to compare: requirements of scaleray and its extras, and torch's GPU packages."""


def check_nodes(measured: Measured) -> PreflightCheck:
    """Check whether every node could be inspected."""
    failed = [node for node in measured.nodes if node.error]
    count = len(measured.nodes)
    if failed:
        found = node_list([f"{node.name}: {node.error}" for node in failed])
        remedy = (
            "install scaleray[train] in the cluster's Python on every node, and check whether the node is overloaded"
        )
        return PreflightCheck(
            name="nodes", verdict="red", found=found, allowed="every node answers and has scaleray", remedy=remedy
        )
    machines = len({node.machine or node.name for node in measured.nodes})
    found = f"{count} node{'s' if count != 1 else ''} answer{'' if count != 1 else 's'}"
    found += f", on {machines} machine{'s' if machines != 1 else ''}" if machines < count else ""
    return PreflightCheck(name="nodes", verdict="green", found=found, allowed="every node answers and has scaleray")


def check_packages(measured: Measured) -> PreflightCheck:
    """Check whether Python and the compared packages are the same everywhere."""
    nodes = _alive(measured)
    pythons = {node.name: node.python for node in nodes}
    minors = {name: ".".join(version.split(".")[:2]) for name, version in pythons.items()}
    bad, doubtful = [], []
    if len(set(minors.values())) > 1:
        bad.append(f"Python {by_value(pythons)}")
    elif len(set(pythons.values())) > 1:
        doubtful.append(f"Python {by_value(pythons)}")
    other: set[str] = {*minority(minors)}
    for package in WATCHED:
        versions = {node.name: node.packages.get(package, "") for node in nodes}
        if len(set(versions.values())) > 1:
            (bad if package in MUST_BE_EQUAL else doubtful).append(f"{package} {by_value(versions)}")
            other |= {*minority(versions)}
    allowed = "the same Python and packages on all nodes"
    if not bad and not doubtful:
        shown = [f"{name} {nodes[0].packages[name]}" for name in MUST_BE_EQUAL if name in nodes[0].packages]
        found = ", ".join([f"Python {nodes[0].python}", *shown])
        same = sum(package in nodes[0].packages for package in WATCHED) - len(shown)
        found += f" and {same} more" if same else ""
        return PreflightCheck(name="versions", verdict="green", found=found, allowed=allowed)
    remedy = f"install the same versions on {node_list(sorted(other))}: pip install -r constraints.txt, or one image"
    return PreflightCheck(
        name="versions",
        verdict="red" if bad else "yellow",
        found=together([*bad, *doubtful]),
        allowed=allowed,
        remedy=remedy,
    )


def check_drivers(measured: Measured) -> PreflightCheck:
    """Check whether nodes with GPUs have the same driver, CUDA, cuDNN and NCCL."""
    nodes = [node for node in _alive(measured) if node.gpus]
    allowed = "the same driver, CUDA, cuDNN and NCCL"
    if not nodes:
        return PreflightCheck(name="GPU drivers", verdict="not applicable", found="no node has GPUs", allowed=allowed)
    differ = {
        part: versions
        for part in ("driver", "cuda", "cudnn", "nccl")
        if len({*(versions := _of(nodes, part)).values()}) > 1
    }
    if not differ:
        shown = [f"{part} {value}" for part, value in nodes[0].accelerators.items()]
        return PreflightCheck(
            name="GPU drivers", verdict="green", found=", ".join(shown) or "nothing is known", allowed=allowed
        )
    found = together(f"{part} {by_value(versions)}" for part, versions in differ.items())
    # NCCL rejects another version of itself, and kernels of another CUDA round differently; drivers are compatible
    is_bad = any(part in differ for part in ("cuda", "nccl"))
    names = sorted({name for versions in differ.values() for name in minority(versions)})
    remedy = f"install the same image or torch, and the same driver, on {node_list(names)}"
    return PreflightCheck(
        name="GPU drivers", verdict="red" if is_bad else "yellow", found=found, allowed=allowed, remedy=remedy
    )


def _alive(measured: Measured) -> list[NodeSeen]:
    return [node for node in measured.nodes if not node.error]


def _of(nodes: Sequence[NodeSeen], part: str) -> Mapping[str, str]:
    return {node.name: node.accelerators.get(part, "") for node in nodes}
