"""Check the speed of GPUs and links against others of their type and against the planner's catalogue."""

import statistics
from collections.abc import Sequence

from scaleray.clusters.preflight import check_limits
from scaleray.clusters.preflight.check_texts import node_list, together, unmeasured
from scaleray.clusters.preflight.tournament import slow_links
from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.errors import ConfigError, UsageError
from scaleray.planner.cost.communication import all_reduce_s
from scaleray.planner.cost.layout import Group
from scaleray.records.doctor_record import AllReduceTime, DeviceRate, LinkRate, Measured, PreflightCheck, Verdict
from scaleray.records.text.units import seconds

PROCESSOR = "cpu"
"""Kind of a CPU's `DeviceRate`; for CPUs the catalogue has only orders of magnitude."""


def check_rates(measured: Measured) -> PreflightCheck:
    """Check every GPU's rate of matrix products against the other GPUs and the catalogue."""
    name = "matrix products"
    if not measured.rates:
        return unmeasured(name, measured.not_measured.get("rates", "nothing was measured"))
    on_cpu = measured.rates[0].kind == PROCESSOR
    yellow, red = (
        (check_limits.SLOW_PROCESSOR_YELLOW, check_limits.SLOW_PROCESSOR_RED)
        if on_cpu
        else (check_limits.SLOW_CARD_YELLOW, check_limits.SLOW_CARD_RED)
    )
    allowed = f"at least {yellow:.0%} of the median"
    allowed += "" if on_cpu else f", and {check_limits.CATALOGUE_YELLOW:.0%} of the catalogue"
    # the upper of the two middle values: with two GPUs, the slower one is compared with the faster one
    usual = statistics.median_high(rate.flops_per_s for rate in measured.rates)
    slow = sorted((r for r in measured.rates if r.flops_per_s < yellow * usual), key=lambda r: r.flops_per_s)
    found = f"{_flops(usual)} ({measured.rates[0].precision}), the median of {len(measured.rates)}"
    verdicts: list[Verdict] = []
    if slow:
        verdicts.append("red" if slow[0].flops_per_s < red * usual else "yellow")
        found += "; slow: " + node_list([f"{r.name} at {r.flops_per_s / usual:.0%} of it" for r in slow])
    share = _share_of_catalogue(measured.rates)
    if share is not None:
        found += f"; {share:.0%} of the catalogue's"
        verdicts += (
            ["red" if share < check_limits.CATALOGUE_RED else "yellow"] if share < check_limits.CATALOGUE_YELLOW else []
        )
    verdict: Verdict = "red" if "red" in verdicts else "yellow" if verdicts else "green"
    remedy = ""
    if verdict != "green":
        where = node_list(sorted({rate.node for rate in slow}))
        reason = "other processes there" if on_cpu else "heat, power limit and clocks (nvidia-smi -q -d PERFORMANCE)"
        remedy = f"check {reason}{f' on {where}' if where else ''}, or exclude it with scale.label_selector"
    return PreflightCheck(name=name, verdict=verdict, found=found, allowed=allowed, remedy=remedy)


def _share_of_catalogue(rates: Sequence[DeviceRate]) -> float | None:
    """Median ratio of measured rates to those in the catalogue; None if it has none of these GPUs."""
    shares = []
    for rate in rates:
        try:
            gpu = CATALOGUE.find_gpu(rate.kind)
            expected = gpu.peak_flops(rate.precision) * gpu.matmul_share
        except UsageError:
            continue
        shares += [rate.flops_per_s / expected] if rate.kind != PROCESSOR else []
    return statistics.median(shares) if shares else None


def all_reduce_checks(measured: Measured) -> list[PreflightCheck]:
    """Check all-reduces inside and between nodes against the planner's catalogue."""
    inside = [one for one in measured.all_reduces if one.nodes == 1]
    between = [one for one in measured.all_reduces if one.nodes > 1]
    return [
        _all_reduces("all-reduce inside nodes", inside, measured, "one worker per node"),
        _all_reduces("all-reduce between nodes", between, measured, "one node"),
    ]


def _all_reduces(name: str, times: Sequence[AllReduceTime], measured: Measured, why_not: str) -> PreflightCheck:
    allowed = f"at least {check_limits.CATALOGUE_YELLOW:.0%} of the rate expected from the catalogue"
    if not times:
        why = measured.not_measured.get("links", why_not)
        return PreflightCheck(name=name, verdict="not applicable", found=why, allowed=allowed)
    largest = max(one.num_bytes for one in times)
    worst = min((one for one in times if one.num_bytes == largest), key=lambda one: one.bus_bytes_per_s)
    found = f"{_rate(worst.bus_bytes_per_s)} of bus bandwidth with {worst.ranks} workers"
    found += f" on {worst.nodes} nodes" if worst.nodes > 1 else ""
    found += f", at least {seconds(min(one.seconds for one in times))}"
    expected = expected_s(worst, measured)
    if expected is None:
        note = "not compared: specify the network, such as --network 100G" if worst.nodes > 1 else ""
        return PreflightCheck(name=name, verdict="green", found=together([found, note]), allowed=allowed)
    share = expected / worst.seconds
    verdict: Verdict = (
        "red" if share < check_limits.CATALOGUE_RED else "yellow" if share < check_limits.CATALOGUE_YELLOW else "green"
    )
    found += f", {share:.0%} of the catalogue's"
    found += f", slowest on {worst.where}" if worst.where and verdict != "green" else ""
    remedy = ""
    if verdict != "green":
        remedy = (
            "NCCL_DEBUG=INFO shows the network in use (NET/IB or NET/Socket); NCCL_SOCKET_IFNAME or NCCL_IB_HCA sets it"
            if worst.nodes > 1
            else "check for lost NVLink or peer access: nvidia-smi topo -m, nvidia-smi nvlink -s"
        )
    return PreflightCheck(name=name, verdict=verdict, found=found, allowed=allowed, remedy=remedy)


def expected_s(time: AllReduceTime, measured: Measured) -> float | None:
    """Seconds of an all-reduce as predicted by the planner; None if too little is known about the nodes."""
    cluster = cluster_of(measured)
    if cluster is None or (time.nodes > 1 and cluster.network is None):
        return None
    if time.nodes == 1 and cluster.link.is_shared:
        return None  # for copies through memory, the catalogue has only an order of magnitude
    group = Group(time.ranks, time.ranks // time.nodes, time.nodes)
    return all_reduce_s(time.num_bytes, group, cluster)


def cluster_of(measured: Measured) -> Cluster | None:
    """The nodes as a cluster of the planner; None for unknown or different GPUs, and for nodes without GPUs unless the
    network is given, since the catalogue has only orders of magnitude for CPUs."""
    with_gpus = [node for node in measured.nodes if node.gpus]
    if not with_gpus and measured.network:
        core = CATALOGUE.find_gpu("cpu")
        return Cluster(
            gpu=core,
            gpus_per_node=1,
            num_nodes=len(measured.nodes),
            link=CATALOGUE.find_link(core.link),
            network=CATALOGUE.find_network(measured.network),
        )
    kinds = {(gpu.name, len(node.gpus)) for node in with_gpus for gpu in node.gpus}
    if len(kinds) != 1:
        return None
    ((kind, per_node),) = kinds
    try:
        gpu = CATALOGUE.find_gpu(kind)
        network = CATALOGUE.find_network(measured.network or gpu.network) if measured.network or gpu.network else None
        # a GPU that could have NVLink but has none communicates over PCIe
        has_link = with_gpus[0].gpus[0].num_nvlinks > 0 or not gpu.link.startswith("nvlink")
        link = CATALOGUE.find_link(gpu.link if has_link else "pcie4")
        count = len(with_gpus) if network is not None else 1
        return Cluster(
            gpu=gpu,
            gpus_per_node=per_node,
            num_nodes=count,
            link=link,
            network=network,
            board_gpus=max(per_node, gpu.gpus_per_node),
        )
    except (UsageError, ConfigError):
        return None


def link_checks(measured: Measured) -> list[PreflightCheck]:
    """Check the tournament's pairs inside and between nodes, each against others of its type."""
    inside = [pair for pair in measured.links.pairs if not pair.is_between_nodes]
    between = [pair for pair in measured.links.pairs if pair.is_between_nodes]
    checks = [_links("links between nodes", between, measured)]
    return [_links("links inside nodes", inside, measured), *checks] if inside else checks


def _links(name: str, pairs: Sequence[LinkRate], measured: Measured) -> PreflightCheck:
    of_one_machine = len({node.machine or node.name for node in measured.nodes}) < 2
    without_gpus = not any(node.gpus for node in measured.nodes)
    yellow, red = (
        (check_limits.SLOW_LOCAL_LINK_YELLOW, check_limits.SLOW_LOCAL_LINK_RED)
        if of_one_machine and without_gpus
        else (check_limits.SLOW_LINK_YELLOW, check_limits.SLOW_LINK_RED)
    )
    allowed = f"at least {yellow:.0%} of the usual link"
    if not pairs:
        return unmeasured(name, measured.not_measured.get("links", "one node"), allowed=allowed)
    slow = slow_links(pairs, below=yellow)
    count = len(pairs)
    found = f"{_rate(slow.usual)} typical, {count} links" if count > 1 else f"{_rate(slow.usual)}, one link"
    played, of = measured.links.rounds, measured.links.all_rounds
    found += f" ({played} of {of} rounds, for lack of time)" if played < of else ""
    if slow.ends or slow.links:
        named = [f"{end} to all others" for end in slow.ends]
        named += [f"{pair.name} at {_rate(pair.bytes_per_s)}" for pair in slow.links]
        verdict: Verdict = "red" if slow.share < red else "yellow"
        remedy = (
            f"check cable, adapter and switch port of {node_list([*slow.ends, *(p.name for p in slow.links)])} "
            "(ethtool, ibstat), or exclude the node with scale.label_selector"
        )
        found = f"{found}; slow: {node_list(named)}, the slowest at {slow.share:.0%} of it"
        return PreflightCheck(name=name, verdict=verdict, found=found, allowed=allowed, remedy=remedy)
    return PreflightCheck(name=name, verdict="green", found=found, allowed=allowed)


def _flops(value: float) -> str:
    return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"
