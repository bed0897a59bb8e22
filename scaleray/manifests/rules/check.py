"""Check of a manifest: the rules that it breaks."""

from __future__ import annotations

from scaleray.manifests.rules import kuberay, own, ray_up
from scaleray.manifests.rules.kuberay import Manifest
from scaleray.manifests.versions import KUBERAY, as_numbers
from scaleray.manifests.wanted import NEEDS_KUBERAY

RULES = {**kuberay.RULES, **own.RULES}
CHECKED = ("RayCluster", "RayJob")


def kind_of(manifest: Manifest) -> str | None:
    """RayCluster, RayJob or `ray up`: what rules are here for; None for anything else."""
    if {"cluster_name", "provider"} <= manifest.keys():
        return "ray up"
    kind = manifest.get("kind")
    return kind if kind in CHECKED else None


def broken_rules(manifest: Manifest) -> list[tuple[str, str]]:
    """Name of the rule and a sentence, for each fault of a manifest; kinds without rules have none."""
    kind = kind_of(manifest)
    rules = {None: {}, "ray up": ray_up.RULES}.get(kind, RULES)
    return [(name, fault) for name, rule in rules.items() for fault in rule(manifest)]


def too_new_fields(manifest: Manifest, kuberay_version: str = KUBERAY) -> dict[str, str]:
    """Fields of a manifest that this release of the operator does not know -> the release that brought them."""
    found = {}
    for path, since in NEEDS_KUBERAY.items():
        node: object = manifest
        for part in path.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node is not None and as_numbers(since) > as_numbers(kuberay_version):
            found[path] = since
    return found
