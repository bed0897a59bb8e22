"""Check each node's resources: visible and idle GPUs, system limits, shared memory, disk space."""

from collections.abc import Callable, Iterable, Sequence

from scaleray.clusters.preflight import check_limits
from scaleray.clusters.preflight.check_texts import by_value, node_list, together
from scaleray.records.doctor_record import GpuSeen, Measured, NodeSeen, PreflightCheck, Verdict
from scaleray.records.text.units import GIB, disk_space

Judged = tuple[Verdict, str]
"""A verdict, and the finding."""


def machine_checks(measured: Measured) -> list[PreflightCheck]:
    """Checks of every node that could be inspected."""
    nodes = [node for node in measured.nodes if not node.error]
    return [
        _gpus_there(nodes),
        _gpus_idle(nodes),
        _check(
            "open files",
            nodes,
            _open_files,
            f"at least {check_limits.OPEN_FILES_YELLOW}",
            "run ulimit -n 65536 before Ray starts there, or set LimitNOFILE= of its service or nofile in limits.conf",
        ),
        _check(
            "processes",
            nodes,
            _processes,
            f"at least {check_limits.PROCESSES_YELLOW}, since threads count",
            "run ulimit -u unlimited before Ray starts there; in a container, raise the limit of pids",
        ),
        _check(
            "locked memory",
            nodes,
            _locked_memory,
            "unlimited with InfiniBand or RoCE",
            "run ulimit -l unlimited before Ray starts there (--ulimit memlock=-1 in Docker); else NCCL falls back "
            "or fails",
        ),
        _check(
            "/dev/shm",
            nodes,
            _shm,
            f"at least {disk_space(check_limits.SHM_YELLOW)}, and the object store's size",
            "set --shm-size in Docker, or an emptyDir with medium: Memory in Kubernetes; otherwise Ray uses a disk",
        ),
        _check(
            "object store",
            nodes,
            _object_store,
            f"at least {disk_space(check_limits.OBJECT_STORE_YELLOW)}",
            "set ray start --object-store-memory; Ray takes 30 % of the memory by default",
        ),
        _check(
            "free disk",
            nodes,
            _disks,
            f"{disk_space(check_limits.DISK_FREE_YELLOW)} free, at most {check_limits.DISK_FULL_YELLOW:.0%} full",
            "free space there, or choose other disks: checkpoint.storage_path, TMPDIR, ray start --temp-dir",
        ),
    ]


def _gpus_there(nodes: Sequence[NodeSeen]) -> PreflightCheck:
    name, allowed = "GPUs visible", "driver, torch and Ray show the same number, equal on all nodes with GPUs"
    with_gpus = [node for node in nodes if node.gpus or node.ray_gpus]
    if not with_gpus:
        return PreflightCheck(name=name, verdict="not applicable", found="no node has GPUs", allowed=allowed)
    unlike = [
        f"{node.name}: the driver shows {len(node.gpus)}, torch {node.torch_gpus}"
        + ("" if node.ray_gpus is None else f", Ray {node.ray_gpus:g}")
        for node in with_gpus
        if {len(node.gpus), node.torch_gpus, node.ray_gpus if node.ray_gpus is not None else node.torch_gpus}
        != {len(node.gpus)}
    ]
    kinds = {node.name: _kind(node) for node in with_gpus}
    if unlike:
        remedy = "check CUDA_VISIBLE_DEVICES, torch's build (torch.version.cuda), and ray start --num-gpus there"
        return PreflightCheck(name=name, verdict="red", found=node_list(unlike), allowed=allowed, remedy=remedy)
    if len(set(kinds.values())) > 1:
        remedy = "choose nodes of one type with scale.label_selector, since a step takes as long as on the slowest GPU"
        return PreflightCheck(name=name, verdict="yellow", found=by_value(kinds), allowed=allowed, remedy=remedy)
    found = f"{next(iter(kinds.values()))} on {len(with_gpus)} node{'s' if len(with_gpus) != 1 else ''}"
    return PreflightCheck(name=name, verdict="green", found=found, allowed=allowed)


def _kind(node: NodeSeen) -> str:
    names = {gpu.name for gpu in node.gpus}
    return f"{len(node.gpus)} x {', '.join(sorted(names))}"


def _gpus_idle(nodes: Sequence[NodeSeen]) -> PreflightCheck:
    found = [(node, gpu, *_in_use(gpu)) for node in nodes for gpu in node.gpus]
    allowed = "no process uses a GPU, and its memory is free"
    if not found:
        return PreflightCheck(name="GPUs idle", verdict="not applicable", found="no node has GPUs", allowed=allowed)
    busy = [(verdict, f"GPU {gpu.index} of {node.name}: {words}") for node, gpu, verdict, words in found if words]
    if not busy:
        return PreflightCheck(name="GPUs idle", verdict="green", found=f"{len(found)} are idle", allowed=allowed)
    verdict: Verdict = "red" if any(one == "red" for one, _ in busy) else "yellow"
    remedy = "wait for these processes or end them (nvidia-smi there), or choose other nodes with scale.label_selector"
    return PreflightCheck(
        name="GPUs idle", verdict=verdict, found=node_list([words for _, words in busy]), allowed=allowed, remedy=remedy
    )


def is_idle(gpu: GpuSeen) -> bool:
    """Whether a GPU is idle, so that measuring does not disturb other programs."""
    return not _in_use(gpu)[1]


def _in_use(gpu: GpuSeen) -> Judged:
    """Severity and description of a GPU's use; the description is empty if it is idle."""
    used, whole = gpu.used_bytes or 0, gpu.memory_bytes or 0
    words, verdict = [], "yellow"
    if gpu.processes:
        words.append(node_list(gpu.processes))
        verdict = "red"
    if whole and used > check_limits.GPU_MEMORY_RED * whole:
        words.append(f"{disk_space(used)} of {disk_space(whole)} in use")
        verdict = "red"
    elif used > check_limits.GPU_MEMORY_YELLOW:
        words.append(f"{disk_space(used)} in use")
    if gpu.utilisation is not None and gpu.utilisation > check_limits.GPU_BUSY_YELLOW:
        words.append(f"{gpu.utilisation:.0%} busy")
    return ("red" if verdict == "red" else "yellow"), ", ".join(words)


def _check(
    name: str, nodes: Sequence[NodeSeen], evaluate: Callable[[NodeSeen], Judged | None], allowed: str, remedy: str
) -> PreflightCheck:
    """Check each node, and report the worst verdict with the nodes that have it."""
    judged = [(node, found) for node in nodes if (found := evaluate(node)) is not None]
    if not judged:
        return PreflightCheck(name=name, verdict="not applicable", found="nothing to check", allowed=allowed)
    bad = [(node, found) for node, found in judged if found[0] != "green"]
    if not bad:
        least = _distinct(found[1] for _, found in judged)
        return PreflightCheck(name=name, verdict="green", found=least, allowed=allowed)
    words = [f"{node.name}: {found[1]}" for node, found in bad]
    verdict: Verdict = "red" if any(found[0] == "red" for _, found in bad) else "yellow"
    return PreflightCheck(name=name, verdict=verdict, found=node_list(words), allowed=allowed, remedy=remedy)


def _distinct(texts: Iterable[str]) -> str:
    found = list(dict.fromkeys(texts))
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}" if len(found) == 2 else node_list(found)


def _open_files(node: NodeSeen) -> Judged | None:
    return _at_least(node, "nofile", check_limits.OPEN_FILES_RED, check_limits.OPEN_FILES_YELLOW)


def _processes(node: NodeSeen) -> Judged | None:
    return _at_least(node, "nproc", 0, check_limits.PROCESSES_YELLOW)


def _at_least(node: NodeSeen, limit: str, red: int, yellow: int) -> Judged | None:
    if limit not in node.limits:
        return None
    value = node.limits[limit]
    if value is None:
        return "green", "unlimited"
    return ("red" if value < red else "yellow" if value < yellow else "green"), str(value)


def _locked_memory(node: NodeSeen) -> Judged | None:
    if not node.has_rdma or "memlock" not in node.limits:
        return None
    value = node.limits["memlock"]
    return ("green", "unlimited") if value is None else ("red", disk_space(value))


def _shm(node: NodeSeen) -> Judged | None:
    if node.shm_bytes is None:
        return None
    words = disk_space(node.shm_bytes)
    if node.shm_bytes < check_limits.SHM_RED:
        return "red", words
    store = node.object_store_bytes or 0
    if node.shm_bytes < store:
        return "yellow", f"{words}, less than the object store of {disk_space(store)}"
    return ("yellow" if node.shm_bytes < check_limits.SHM_YELLOW else "green"), words


def _object_store(node: NodeSeen) -> Judged | None:
    if node.object_store_bytes is None:
        return None
    return (
        "yellow" if node.object_store_bytes < check_limits.OBJECT_STORE_YELLOW else "green",
        disk_space(node.object_store_bytes),
    )


def _disks(node: NodeSeen) -> Judged | None:
    if not node.disks:
        return None
    worst: Verdict = "green"
    words = []
    for disk in node.disks:
        full = 1 - disk.free_bytes / disk.total_bytes if disk.total_bytes else 1.0
        is_red = disk.free_bytes < check_limits.DISK_FREE_RED or full > check_limits.DISK_FULL_RED
        is_yellow = disk.free_bytes < check_limits.DISK_FREE_YELLOW or full > check_limits.DISK_FULL_YELLOW
        if is_red or is_yellow:
            worst = "red" if is_red or worst == "red" else "yellow"
            words.append(f"{disk_space(disk.free_bytes)} free, {full:.0%} full for {disk.use} ({disk.path})")
    if worst != "green":
        return worst, together(words)
    least = min(node.disks, key=lambda disk: disk.free_bytes)
    return worst, f"at least {least.free_bytes / GIB:.0f} GiB free"
