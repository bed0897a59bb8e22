"""Versions in all files of `cluster/`, defined only here; a test compares them with constraints.txt.

Image, Ray, Python and torch of a cluster must match the submitting machine, since Ray rejects other versions of itself.
"""

import re

from scaleray import __version__

SCALERAY = __version__
RAY = "2.60.0"
PYTHON = "3.11"
TORCH = "2.13.0"
CUDA = "13.0"
"""CUDA version of torch's wheel on PyPI, which includes cuDNN and NCCL; the machine provides only the driver."""
DRIVER = "580.65.06"
"""Oldest NVIDIA driver that supports CUDA 13.0."""
DEBIAN = "bookworm"
KUBERAY = "1.7.0"
"""Operator release against whose schema and rules the manifests are checked."""
PYTHON_IMAGE = f"python:{PYTHON}-slim-{DEBIAN}"
IMAGE = f"scaleray:{SCALERAY}-ray{RAY}-py{PYTHON.replace('.', '')}-cu{CUDA.replace('.', '')}"
CPU_IMAGE = f"scaleray:{SCALERAY}-ray{RAY}-py{PYTHON.replace('.', '')}-cpu"


def as_numbers(version: str) -> tuple[int, ...]:
    """A version as numbers, so that 1.10.0 is newer than 1.9.1; text after the numbers is ignored."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else ()
