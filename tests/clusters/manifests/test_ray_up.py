"""Files for `ray up`: Ray's own checks, and ours of the parts that these leave open."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cluster_files import CLUSTER, ROOT, places
from file_rules import check_ray_up_file
from optional_programs import needs, program

from scaleray.clusters.manifests.cluster_spec import ClusterSpec
from scaleray.clusters.manifests.file_versions import DRIVER
from scaleray.clusters.manifests.written_files import files

FILES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CLUSTER / "ray_up").glob("*.yaml"))}
CLOUDS = ("aws", "gcp")
ALL = (*CLOUDS, "on_premise")


def ray_takes(document) -> bool:
    """Whether Ray's own preparation and schema have nothing against a file."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(copy.deepcopy(document)))
    except Exception:  # Ray raises of every kind
        return False
    return True


@pytest.mark.parametrize("name", FILES)
def test_ray_itself_takes_the_file_and_refuses_one_without_a_provider(name):
    assert ray_takes(FILES[name])
    assert not ray_takes({key: value for key, value in FILES[name].items() if key != "provider"})


@pytest.mark.parametrize("name", FILES)
def test_it_keeps_every_rule(name):
    check_ray_up_file(FILES[name])


def keeps_the_rules(document) -> bool:
    try:
        check_ray_up_file(document)
    except (AssertionError, LookupError):
        return False
    return True


def test_misspelt_keys_are_found_by_schema_or_rules():
    tried, missed = 0, []
    for name, document in FILES.items():
        for path in places(document):
            if (
                "node_config" in path
                or path[-1] == "CPU"
                or path[-1] == "GPU"
                or (path[:1] == ("file_mounts",) and len(path) > 1)
            ):
                continue  # the provider's own, and any name is good there
            changed = copy.deepcopy(document)
            node = changed
            for part in path[:-1]:
                node = node[part]
            node[f"{path[-1]}x"] = node.pop(path[-1])
            tried += 1
            if keeps_the_rules(changed) and ray_takes(changed):
                missed.append((name, path))
    assert len(missed) <= 0.05 * tried, missed


def test_a_machine_that_a_cloud_does_not_rent_is_said():
    texts = files(ClusterSpec(gpus="4xa10g"), ["ray-up"])
    assert "NOT-RENTED-BY-GOOGLE" in texts["ray_up/gcp.yaml"]
    check_ray_up_file(yaml.safe_load(texts["ray_up/gcp.yaml"]))
    assert "NOT-RENTED" not in texts["ray_up/aws.yaml"]
    check_ray_up_file(yaml.safe_load(texts["ray_up/aws.yaml"]))


@pytest.mark.parametrize(("driver", "code"), [("570.10", 1), (DRIVER, 0), ("590.1", 0), (None, 0)])
@pytest.mark.parametrize("name", ALL)
def test_a_machine_whose_driver_is_too_old_says_so_before_it_joins(tmp_path, name, driver, code):
    if driver is None and name in CLOUDS:
        return  # their machines of this kind have GPUs
    lists = (
        FILES[name].get("setup_commands"),
        FILES[name].get("available_node_types", {}).get("gpu", {}).get("worker_setup_commands"),
    )
    [check] = [line for lines in lists for line in lines or () if "nvidia-smi" in line]
    for tool in ("bash", "printf", "sort"):
        (tmp_path / tool).symlink_to(program(tool))
    if driver is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/bash\necho {driver}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", check], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == code and ("the driver is older than" in done.stdout) is bool(code), done.stderr


@needs("ssh", "sshd")
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_ray_up_starts_two_machines_over_ssh_and_ends_them():
    script = CLUSTER / "ray_up" / "try_on_one_machine.sh"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ray and python of this environment
    done = subprocess.run(
        [str(script)], cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=850
    )
    if done.returncode == 75:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0 and done.stdout.strip().endswith("all is well"), (
        done.stdout[-4000:] + done.stderr[-4000:]
    )
