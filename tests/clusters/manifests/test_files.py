"""The files of `cluster/` are what the command writes, and stay so."""

from __future__ import annotations

import re

import pytest
import yaml
from cluster_files import CLUSTER, ROOT

from scaleray.cli.main import run_command
from scaleray.clusters.manifests import file_versions
from scaleray.clusters.manifests.cloud_machines import MACHINES
from scaleray.clusters.manifests.cluster_spec import ClusterSpec
from scaleray.clusters.manifests.written_files import KINDS, differing, files, write
from scaleray.errors import UsageError


def test_the_repositorys_files_are_what_is_written_by_default():
    assert differing(CLUSTER, files(ClusterSpec())) == []


def test_no_file_of_a_kinds_folder_is_written_by_hand():
    written = set(files(ClusterSpec()))
    there = {
        path.relative_to(CLUSTER).as_posix()
        for folder in KINDS.values()
        for path in (CLUSTER / folder).rglob("*")
        if path.is_file()
    }
    assert there == written


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: f"{machine.gpus}x{machine.gpu}")
def test_every_machine_gives_files_that_are_yaml_and_say_its_gpus(machine):
    wanted = ClusterSpec(gpus=f"{machine.gpus}x{machine.gpu}", nodes=3, image="registry/x:1", cpu_image="registry/y:1")
    texts = files(wanted, ["kubernetes"])
    for text in texts.values():
        list(yaml.safe_load_all(text))
    job = yaml.safe_load(texts["kubernetes/job-gpu/rayjob.yaml"])["spec"]
    [workers] = job["rayClusterSpec"]["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(machine.gpus)
    assert container["image"] == "registry/x:1" and workers["replicas"] == 3
    assert f"--scale.workers {3 * machine.gpus} " in job["entrypoint"]


def test_versions_stand_nowhere_but_in_the_table():
    for path in (ROOT / "scaleray" / "manifests" / "templates").rglob("*.in"):
        for said in (
            file_versions.RAY,
            file_versions.TORCH,
            file_versions.SCALERAY,
            file_versions.DRIVER,
            file_versions.PYTHON_IMAGE,
        ):
            assert not re.search(rf"(?<![\d.]){re.escape(said)}(?![\d.])", path.read_text()), (path, said)


def test_what_is_there_and_differs_is_not_overwritten_unasked(tmp_path):
    texts = files(ClusterSpec(), ["kubernetes"])
    assert len(write(tmp_path, texts)) == len(texts) and write(tmp_path, texts) == []
    edited = tmp_path / "kubernetes/base/storage.yaml"
    edited.write_text(edited.read_text().replace("500Gi", "5Ti"))
    with pytest.raises(UsageError, match="--overwrite"):
        write(tmp_path, texts)
    assert "5Ti" in edited.read_text()
    assert write(tmp_path, texts, overwrite=True) == [edited] and differing(tmp_path, texts) == []


def test_check_names_what_is_missing_and_from_which_line_a_file_differs(tmp_path, capsys):
    command = ["cluster", "write", "--kind", "kubernetes", "--folder", str(tmp_path)]
    assert run_command(command) == 0 and run_command([*command, "--check"]) == 0
    (tmp_path / "kubernetes/base/storage.yaml").unlink()
    priority = tmp_path / "kubernetes/admin/priority.yaml"
    priority.write_text(priority.read_text().replace("value: -10", "value: 10"))
    capsys.readouterr()
    assert run_command([*command, "--check"]) == 1
    said = capsys.readouterr().out
    assert "storage.yaml is missing" in said and "priority.yaml differs from line 6 on" in said
    assert run_command([*command, "--check", "--nodes", "7"]) == 1
    assert "job-gpu/rayjob.yaml differs" in capsys.readouterr().out


def test_bad_input_is_one_message(tmp_path, capsys):
    (tmp_path / "a_file").write_text("")
    for words in (
        ["--gpus", "9xh100"],
        ["--nodes", "0"],
        ["--image", "scaleray"],
        ["--kuberay", "1.4.2"],
        ["--kuberay", "newest"],
        ["--folder", str(tmp_path / "a_file")],
    ):
        assert run_command(["cluster", "write", "--kind", "kubernetes", "--folder", str(tmp_path / "out"), *words]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) <= 2
    assert not (tmp_path / "out").exists()
