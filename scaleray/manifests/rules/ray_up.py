"""What must hold of a file for `ray up` beyond Ray's own schema, which leaves the provider and the commands open."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from scaleray.manifests import versions
from scaleray.manifests.grace import RAY_STOP, RAY_STOP_BY_ITSELF_S, SAVING
from scaleray.manifests.rules.kuberay import Manifest, Rule
from scaleray.manifests.wanted import has_fixed_tag

PROVIDER_KEYS = {
    "aws": {"type", "region", "availability_zone", "cache_stopped_nodes", "use_internal_ips", "security_group"},
    "gcp": {"type", "region", "availability_zone", "project_id", "use_internal_ips", "cache_stopped_nodes"},
    "local": {"type", "head_ip", "worker_ips", "coordinator_address", "external_head_ip"},
}
NEEDED_KEYS = {"aws": {"region"}, "gcp": {"region", "availability_zone", "project_id"}, "local": {"head_ip"}}
TOKEN_FILE = "~/.ray/auth_token"
STARTS = ("head_start_ray_commands", "worker_start_ray_commands")


def commands(manifest: Manifest, name: str) -> str:
    """Commands of one name as one text."""
    return "\n".join(str(line) for line in manifest.get(name) or ())


def provider_is_known(manifest: Manifest) -> Iterator[str]:
    """The provider has its fields, and none that it does not know: Ray passes over a slip of the pen."""
    provider = manifest.get("provider") or {}
    known = PROVIDER_KEYS.get(provider.get("type", ""))
    if known is None:
        yield f"provider.type is {provider.get('type')!r}, and {', '.join(PROVIDER_KEYS)} are known here"
        return
    for key in sorted(set(provider) - known):
        yield f"provider.{key} is not known: there are {', '.join(sorted(known))}"
    for key in sorted(NEEDED_KEYS[provider["type"]] - set(provider)):
        yield f"provider.{key} is missing"
    addresses = [provider.get("head_ip"), *(provider.get("worker_ips") or ())]
    if provider["type"] == "local" and len(set(addresses)) < len(addresses):
        yield "an address stands twice among head_ip and worker_ips"


def types_are_there(manifest: Manifest) -> Iterator[str]:
    """The head's type is one of those that are described, and counts are ranges within the whole."""
    types: dict[str, Any] = manifest.get("available_node_types") or {}
    if (manifest.get("provider") or {}).get("type") == "local":
        return
    if manifest.get("head_node_type") not in types:
        yield f"head_node_type is {manifest.get('head_node_type')!r}, and there are {', '.join(types)}"
    least = 0
    for name, one in types.items():
        low, high = one.get("min_workers", 0), one.get("max_workers", manifest.get("max_workers", 2))
        least += low
        if low > high:
            yield f"{name} has min_workers {low}, more than max_workers {high}"
        if "NOT-RENTED" in str(one.get("node_config")):
            yield f"{name}: this cloud does not rent such a machine"
    if least > manifest.get("max_workers", 2):
        yield f"max_workers is {manifest.get('max_workers', 2)}, and the types ask for {least}"


def a_token_is_asked_for(manifest: Manifest) -> Iterator[str]:
    """Every node has the token's file, for its owner alone, and starts Ray with it."""
    if TOKEN_FILE not in (manifest.get("file_mounts") or {}):
        yield f"file_mounts lacks {TOKEN_FILE}: nodes have no token"
    for name in STARTS:
        text = commands(manifest, name)
        if not re.search(r"RAY_AUTH_MODE=token (\S+=\S+ )*ray start", text):
            yield f"{name} starts Ray without RAY_AUTH_MODE=token: whoever reaches it runs code"
        if f"chmod 600 {TOKEN_FILE}" not in text:
            yield f"{name} leaves the token readable for others: chmod 600 {TOKEN_FILE}"
        if re.search(r"RAY_AUTH_TOKEN=", text):
            yield f"{name} has the token itself in it"


def the_dashboard_is_local(manifest: Manifest) -> Iterator[str]:
    """The dashboard is on the head's loopback: `ray dashboard` and ssh bring it to you."""
    if "--dashboard-host=127.0.0.1" not in commands(manifest, STARTS[0]):
        yield "head_start_ray_commands: --dashboard-host=127.0.0.1 is missing"


def workers_find_the_head(manifest: Manifest) -> Iterator[str]:
    """Head and workers name one port, the head its autoscaling config, and what ran before is stopped."""
    head, worker = (commands(manifest, name) for name in STARTS)
    port = re.search(r"--port=(\d+)", head)
    if port is None or f"--address=$RAY_HEAD_IP:{port[1]} " not in f"{worker} ":
        yield "worker_start_ray_commands do not go to the port of head_start_ray_commands"
    if "--autoscaling-config=~/ray_bootstrap_config.yaml" not in head:
        yield "head_start_ray_commands: --autoscaling-config=~/ray_bootstrap_config.yaml is missing, no worker starts"
    if (manifest.get("provider") or {}).get("type") == "local" and "RAY_enable_autoscaler_v2=0" not in head:
        yield "head_start_ray_commands: without RAY_enable_autoscaler_v2=0 Ray 2.60 starts no machine of a list"
    for name, text in zip(STARTS, (head, worker), strict=True):
        if "ray stop" not in text:
            yield f"{name}: `ray stop` is missing before the start"


def a_training_has_time_to_save(manifest: Manifest) -> Iterator[str]:
    """The head, where drivers run, is told how long saving may take: less than Ray waits before it kills."""
    text = commands(manifest, STARTS[0]).partition("ray start")[0]  # what is set later does not reach it
    saving, stop = (re.search(rf"\b{name}=(\d+(?:\.\d+)?)\b", text) for name in (SAVING, RAY_STOP))
    if saving is None:
        yield f"head_start_ray_commands do not set {SAVING}: a training that is asked to leave would have 2.5 s to save"
        return
    after = float(stop[1]) if stop else RAY_STOP_BY_ITSELF_S
    if float(saving[1]) >= after:
        yield f"head_start_ray_commands: {SAVING} {saving[1]} is not below {after:g}, Ray's {RAY_STOP}"


def versions_agree(manifest: Manifest) -> Iterator[str]:
    """The image has a fixed tag with the Ray and Python of who submits; without one, a setup command looks at them."""
    image = (manifest.get("docker") or {}).get("image")
    if image is None:
        if versions.RAY not in commands(manifest, "setup_commands"):
            yield f"setup_commands do not look whether a machine has Ray {versions.RAY}"
        return
    if not has_fixed_tag(image):
        yield f"docker.image is {image!r}: name a tag other than latest, or a digest"
    ray, python = re.search(r"ray(\d+\.\d+\.\d+)", image), re.search(r"-py(\d+)", image)
    if ray and ray[1] != versions.RAY:
        yield f"docker.image has Ray {ray[1]}, and scaleray runs with {versions.RAY}"
    if python and python[1] != versions.PYTHON.replace(".", ""):
        yield f"docker.image has Python {python[1]}, and {versions.PYTHON} is asked for"


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        provider_is_known,
        types_are_there,
        a_token_is_asked_for,
        the_dashboard_is_local,
        workers_find_the_head,
        a_training_has_time_to_save,
        versions_agree,
    )
}
