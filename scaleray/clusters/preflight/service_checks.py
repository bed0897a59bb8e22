"""Check what nodes share: the storage of runs, MLflow, and the network between nodes."""

from scaleray.clusters.preflight import check_limits
from scaleray.clusters.preflight.check_texts import node_list, together, unmeasured
from scaleray.records.doctor_record import Measured, PreflightCheck, Verdict


def check_ports(measured: Measured) -> PreflightCheck:
    """Check whether every node reaches the others on ephemeral ports, and whether there are enough of them."""
    name, allowed = "ports", f"every node reaches every other; {check_limits.PORTS_YELLOW} ephemeral ports"
    nodes = [node for node in measured.nodes if not node.error]
    if measured.closed:
        pairs = node_list([f"{one} cannot reach {other}" for one, other in measured.closed])
        remedy = (
            "open all TCP ports between the nodes (a security group that allows itself), and check that each node's "
            "address is on the shared network: ray start --node-ip-address"
        )
        return PreflightCheck(name=name, verdict="red", found=pairs, allowed=allowed, remedy=remedy)
    if few := [node for node in nodes if node.port_range is not None and node.port_range < check_limits.PORTS_YELLOW]:
        found = node_list([f"{node.name} has {node.port_range}" for node in few])
        remedy = "run sysctl -w net.ipv4.ip_local_port_range='32768 60999' there"
        return PreflightCheck(name=name, verdict="yellow", found=found, allowed=allowed, remedy=remedy)
    if why := measured.not_measured.get("ports", ""):
        return unmeasured(name, why, allowed=allowed)
    found = "every node reaches every other one"
    return PreflightCheck(name=name, verdict="green", found=found, allowed=allowed)


def check_storage(measured: Measured) -> PreflightCheck:
    """Check whether every node can write to the storage and sees the other nodes' files, and how fast it writes."""
    name = "shared storage"
    allowed = f"writable and shared by all, {_rate(check_limits.STORAGE_YELLOW_BYTES_PER_S)} each"
    if not measured.storage:
        return unmeasured(name, measured.not_measured.get("storage", "nothing was tried"), allowed=allowed)
    if failed := [one for one in measured.storage if one.error]:
        found = node_list([f"{one.node}: {one.error}" for one in failed])
        remedy = (
            f"mount {measured.storage_path} there, writable for Ray's user, or choose another: checkpoint.storage_path"
        )
        return PreflightCheck(name=name, verdict="red", found=found, allowed=allowed, remedy=remedy)
    if blind := [one for one in measured.storage if one.does_not_see]:
        found = f"{measured.storage_path} is not shared: " + node_list(
            [f"{one.node} does not see files of {node_list(one.does_not_see)}" for one in blind]
        )
        remedy = (
            "choose a folder that all nodes mount (NFS, Lustre, FSx), or a bucket: checkpoint.storage_path s3://..."
        )
        return PreflightCheck(name=name, verdict="red", found=found, allowed=allowed, remedy=remedy)
    rates = [rate for one in measured.storage if (rate := one.write_bytes_per_s) is not None]
    reads = [rate for one in measured.storage if (rate := one.read_bytes_per_s) is not None]
    slowest = min(rates, default=None)
    found = together(
        [
            f"written at {_rate(slowest)} or more" if slowest is not None else "",
            f"read at {_rate(min(reads))} or more" if reads else "",
        ]
    )
    verdict: Verdict = "green"
    if slowest is not None and slowest < check_limits.STORAGE_YELLOW_BYTES_PER_S:
        verdict = "red" if slowest < check_limits.STORAGE_RED_BYTES_PER_S else "yellow"
        slow = min(measured.storage, key=lambda one: one.write_bytes_per_s or float("inf"))
        found += f", slowest on {slow.node}" if len(rates) > 1 else ""
    remedy = "" if verdict == "green" else "use another storage, or fewer checkpoints: checkpoint.every_minutes"
    return PreflightCheck(name=name, verdict=verdict, found=found, allowed=allowed, remedy=remedy)


def check_mlflow(measured: Measured) -> PreflightCheck:
    """Check whether MLflow answers the driver, which records runs, and all nodes, since any may run a job's driver."""
    allowed = "it answers the driver and every node"
    if measured.tracking_error:
        remedy = "start it, correct tracking.uri, or omit the key for an SQLite file on the driver's machine"
        return PreflightCheck(
            name="MLflow", verdict="red", found=measured.tracking_error, allowed=allowed, remedy=remedy
        )
    if away := [node for node in measured.nodes if node.mlflow_error]:
        found = node_list([f"{node.name}: {node.mlflow_error}" for node in away])
        remedy = "open access to it from there: the driver of a submitted job may run on that node"
        return PreflightCheck(name="MLflow", verdict="yellow", found=found, allowed=allowed, remedy=remedy)
    asked = sum(node.mlflow_error is not None for node in measured.nodes)
    where = f"; {asked} nodes reach it" if asked > 1 else "; a file, written only by the driver" if not asked else ""
    return PreflightCheck(name="MLflow", verdict="green", found=f"{measured.tracking_uri}{where}", allowed=allowed)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"
