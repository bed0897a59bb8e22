"""Facts about an experiment for the registry before it starts, and its check against the team's policy."""

from collections.abc import Mapping, Sequence
from typing import Any

from scaleray.common.own_folder import user_name
from scaleray.common.printed import quantity
from scaleray.config import RunConfig
from scaleray.config.tracking_monitoring_study import TrackingSettings
from scaleray.launch.session.team_policy import read_team_policy
from scaleray.records import experiment as fields
from scaleray.records.json_record import leaves

LONGEST_TAG = 5000
POLICY = "scaleray.policy"
"""Tag with the name and hash of the policy that was checked."""


def check_policy(config: RunConfig) -> None:
    """Raise ConfigError, before anything is started, if the config violates the team's policy."""
    _exceptions(config.tracking, known_of(config))


def experiment_tags(
    config: RunConfig,
    *,
    environment: Mapping[str, Any],
    nodes: Sequence[Mapping[str, Any]],
    data: Mapping[str, Any],
    workers: int,
    profiled: bool = False,
) -> dict[str, str]:
    """MLflow tags for the registry with facts that are recorded nowhere else. environment: result of
    `reproducibility.fingerprint`. data: facts about the training data.

    Raises ConfigError if the team's policy is violated."""
    git = environment.get("git") or {}
    known = {
        **known_of(config),
        "gpus": workers,
        "hardware": f"{workers} x {_device(config, environment, nodes)}",
        "topology": f"{quantity(len(nodes), 'node')}, {quantity(workers, 'worker')}",
        "data_hash": data.get("sha256"),
        "code": git.get("commit"),
        "uncommitted": git.get("is_dirty"),
        "environment": environment.get("os"),
    }
    tags = plan_tags(config.tracking, known)
    return {**tags, fields.PROFILED: "true"} if profiled else tags


def plan_tags(tracking: TrackingSettings, known: Mapping[str, Any]) -> dict[str, str]:
    """Tags of the known fields, after a check of the team's policy. Raises ConfigError if it is violated."""
    policy, broken = _exceptions(tracking, known)
    tags = {
        fields.OWNER: known.get("owner"),
        fields.PURPOSE: known.get("purpose"),
        fields.HARDWARE: known.get("hardware"),
        fields.TOPOLOGY: known.get("topology"),
        fields.EXCEPTIONS: "; ".join(broken),
        POLICY: policy,
    }
    return {name: str(value)[:LONGEST_TAG] for name, value in tags.items() if value}


def said_of(tracking: TrackingSettings) -> dict[str, Any]:
    """Owner and purpose of a run, from its config."""
    return {"owner": tracking.owner or user_name(), "purpose": tracking.purpose}


def _exceptions(tracking: TrackingSettings, known: Mapping[str, Any]) -> tuple[str, list[str]]:
    if tracking.policy is None:
        return "", []
    policy = read_team_policy(tracking.policy)
    return policy.name, policy.check(known, reason=tracking.policy_reason)


def known_of(config: RunConfig) -> dict[str, Any]:
    """The config's values, by key and by the registry's names for some of the keys."""
    values = dict(leaves(config.to_dict(), of_lists=False))
    return {
        **values,
        **said_of(config.tracking),
        "gpus": config.scale.max_workers,
        "model": config.workload.name,
        "strategy": config.strategy.name,
        "global_batch": config.batch.global_size,
        "rule": config.optimizer.rule,
        "cost": config.study.price_per_worker_hour,
    }


def _device(config: RunConfig, environment: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Hardware of one worker: the name of its GPU, or of the CPU that workers share."""
    if not config.scale.gpus:
        return str((environment.get("cpu") or {}).get("model") or "CPU")
    of_nodes = [str(node["accelerator"]) for node in nodes if node.get("accelerator")]
    here = [str(name) for name in (environment.get("accelerators") or {}).get("names") or ()]
    return next(iter([*of_nodes, *here]), "GPU")
