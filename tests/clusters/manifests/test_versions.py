"""The one table of versions says what is installed, required and tested elsewhere."""

from __future__ import annotations

import re
import tomllib

import pytest
from cluster_files import ROOT

from scaleray.clusters.manifests import file_versions
from scaleray.clusters.manifests.cloud_machines import MACHINES, machine_of
from scaleray.clusters.manifests.cluster_spec import ClusterSpec, has_fixed_tag
from scaleray.clusters.manifests.file_versions import as_numbers
from scaleray.common.installed import NEWEST_TESTED
from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.errors import UsageError

PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_ray_and_torch_are_those_of_the_constraints_and_the_newest_that_was_tested():
    assert PINNED["ray"] == file_versions.RAY and PINNED["torch"] == file_versions.TORCH
    assert file_versions.RAY.startswith(NEWEST_TESTED["ray"]) and file_versions.TORCH.startswith(NEWEST_TESTED["torch"])


def test_python_is_the_one_that_types_are_checked_for_and_may_be_installed_with():
    assert PROJECT["tool"]["mypy"]["python_version"] == file_versions.PYTHON
    assert PROJECT["project"]["requires-python"] == f">={file_versions.PYTHON}"


def test_the_images_name_says_every_version_that_must_agree():
    for image in (file_versions.IMAGE, file_versions.CPU_IMAGE):
        assert f":{PROJECT['project']['version']}-ray{PINNED['ray']}-py311-" in image and has_fixed_tag(image)


def test_every_gpu_is_one_of_the_planners_catalogue():
    known = {gpu.name for gpu in CATALOGUE.gpus}
    assert {machine.gpu for machine in MACHINES} <= known


@pytest.mark.parametrize("words", ["h100", "8h100", "xh100", "8x", "0xh100", "8xabacus", "8xh100x2", ""])
def test_gpus_that_no_machine_has_are_refused_with_those_that_there_are(words):
    with pytest.raises(UsageError, match="8xh100"):
        machine_of(words)


def test_the_larger_memory_is_meant_where_a_name_has_two():
    assert machine_of("8xA100").gpu == "a100-80" and machine_of("8xa100-40").gpu == "a100-40"


@pytest.mark.parametrize(
    ("image", "is_fixed"),
    [
        ("scaleray:1.2", True),
        ("host:5000/team/scaleray:1.2", True),
        (f"scaleray@sha256:{'0' * 64}", True),
        ("scaleray", False),
        ("scaleray:latest", False),
        ("host:5000/scaleray", False),
        ("scaleray:", False),
        ("scaleray@sha256:abc", False),
    ],
)
def test_an_image_is_named_by_a_tag_that_stays_or_a_digest(image, is_fixed):
    assert has_fixed_tag(image) is is_fixed
    if not is_fixed:
        with pytest.raises(UsageError, match="latest"):
            ClusterSpec(image=image)


@pytest.mark.parametrize("older", ["1.4.2", "v1.5.0", "1.5.9"])
def test_an_operator_that_does_not_know_the_manifests_is_one_message_with_what_to_do(older):
    with pytest.raises(UsageError, match=r"upgrade the operator to 1\.6\.0 or newer") as caught:
        ClusterSpec(kuberay=older)
    assert "preRunningDeadlineSeconds (since 1.6.0)" in str(caught.value)


def test_versions_are_compared_as_numbers():
    assert (
        as_numbers("1.10.0") > as_numbers("v1.9.3")
        and as_numbers("1.6.0-rc.1") == (1, 6, 0)
        and as_numbers("new") == ()
    )
