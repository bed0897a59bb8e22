"""Files for `ray up`: Ray's own checks, ours of what these leave open, and planted faults."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cluster_files import CLUSTER, GONE, ROOT, edited, places
from optional_programs import needs, program

from scaleray.cli.main import run_command
from scaleray.manifests.files import files
from scaleray.manifests.grace import RAY_STOP, SAVING
from scaleray.manifests.rules.check import broken_rules
from scaleray.manifests.rules.ray_up import RULES
from scaleray.manifests.versions import DRIVER
from scaleray.manifests.wanted import Wanted

FILES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CLUSTER / "ray_up").glob("*.yaml"))}
CLOUDS = ("aws", "gcp")
ALL = (*CLOUDS, "on_premise")
START = "ray start --head --port=6379 --dashboard-host=127.0.0.1 --autoscaling-config=~/ray_bootstrap_config.yaml"
# rule -> (files, edits)
PLANTED = [
    ("provider_is_known", ALL, {"provider.type": "awz"}),
    ("provider_is_known", ALL, {"provider.regions": "here"}),
    ("provider_is_known", CLOUDS, {"provider.region": GONE}),
    ("provider_is_known", ("on_premise",), {"provider.worker_ips": ["10.0.0.1"]}),
    ("types_are_there", CLOUDS, {"head_node_type": "heads"}),
    ("types_are_there", CLOUDS, {"available_node_types.gpu.min_workers": 3}),
    ("types_are_there", CLOUDS, {"max_workers": 1}),
    ("a_token_is_asked_for", ALL, {"file_mounts": GONE}),
    ("a_token_is_asked_for", ALL, {"head_start_ray_commands": ["chmod 600 ~/.ray/auth_token && ray stop", START]}),
    ("a_token_is_asked_for", ALL, {"worker_start_ray_commands": ["ray stop", "RAY_AUTH_MODE=token ray start --address=$RAY_HEAD_IP:6379"]}),
    ("the_dashboard_is_local", ALL, {"head_start_ray_commands.1": "RAY_AUTH_MODE=token ray start --head --port=6379 --dashboard-host=0.0.0.0"}),
    ("workers_find_the_head", ALL, {"worker_start_ray_commands.1": "RAY_AUTH_MODE=token ray start --address=$RAY_HEAD_IP:6380"}),
    ("workers_find_the_head", ALL, {"head_start_ray_commands.1": "RAY_AUTH_MODE=token ray start --head --port=6379"}),
    ("workers_find_the_head", ("on_premise",), {"head_start_ray_commands.1": f"RAY_AUTH_MODE=token {START}"}),
    ("workers_find_the_head", ALL, {"worker_start_ray_commands.0": "chmod 600 ~/.ray/auth_token"}),
    ("a_training_has_time_to_save", ALL, {"head_start_ray_commands.1": f"RAY_AUTH_MODE=token {START}"}),
    ("a_training_has_time_to_save", ALL, {"head_start_ray_commands.1": f"{SAVING}=90 RAY_AUTH_MODE=token {START}"}),
    ("a_training_has_time_to_save", ALL, {"head_start_ray_commands.1": f"{RAY_STOP}=90 {SAVING}=90 RAY_AUTH_MODE=token {START}"}),
    ("versions_agree", CLOUDS, {"docker.image": "scaleray:latest"}),
    ("versions_agree", CLOUDS, {"docker.image": "rayproject/ray:2.60.0-py312"}),
    ("versions_agree", CLOUDS, {"docker.image": "scaleray:0.1.0-ray2.59.0-py311"}),
    ("versions_agree", ("on_premise",), {"setup_commands": GONE}),
]  # fmt: skip


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
    assert not ray_takes(edited(FILES[name], {"provider": GONE}))


@pytest.mark.parametrize("name", FILES)
def test_it_keeps_every_rule(name):
    assert broken_rules(FILES[name]) == []


@pytest.mark.parametrize(("rule", "names", "edits"), PLANTED, ids=lambda value: value if isinstance(value, str) else "")
def test_every_planted_fault_is_found_by_its_rule(rule, names, edits):
    for name in names:
        assert rule in {broken for broken, _ in broken_rules(edited(FILES[name], edits))}, name


def test_every_rule_has_planted_faults_and_every_file_five():
    assert {rule for rule, *_ in PLANTED} == set(RULES)
    assert all(sum(name in names for _, names, _ in PLANTED) >= 5 for name in FILES)


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
            if not broken_rules(changed) and ray_takes(changed):
                missed.append((name, path))
    assert len(missed) <= 0.05 * tried, missed


def test_a_machine_that_a_cloud_does_not_rent_is_said():
    texts = files(Wanted(gpus="4xa10g"), ["ray-up"])
    said = broken_rules(yaml.safe_load(texts["ray_up/gcp.yaml"]))
    assert said == [("types_are_there", "gpu: this cloud does not rent such a machine")]
    assert broken_rules(yaml.safe_load(texts["ray_up/aws.yaml"])) == []


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


def test_the_command_checks_these_files_too(tmp_path, capsys):
    assert run_command(["cluster", "check", str(CLUSTER / "ray_up")]) == 0
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(edited(FILES["aws"], {"file_mounts": GONE})))
    assert run_command(["cluster", "check", str(tmp_path)]) == 1
    assert "ray up scaleray: file_mounts lacks ~/.ray/auth_token" in capsys.readouterr().out


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
