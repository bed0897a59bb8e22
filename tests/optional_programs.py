"""Programs outside the environment that tests use: those of a base system, those of the extra `dev`, and optional ones.

A test that needs optional programs is marked `@needs("promtool")`, which makes it slow too: `make test` leaves it out and
hides the programs, `make slow` runs it if they are installed. `python tests/optional_programs.py FOLDER` prints a PATH
without the optional programs; FOLDER receives links to the others.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OPTIONAL = {
    "promtool": "Debian: prometheus",
    "prometheus": "Debian: prometheus",
    "prometheus-alertmanager": "Debian: prometheus-alertmanager",
    "alertmanager": "another name of prometheus-alertmanager",
    "chromium": "Debian: chromium",
    "chromium-browser": "another name of chromium",
    "google-chrome": "another name of chromium",
    "fish": "Debian: fish",
    "zsh": "Debian: zsh",
    "openssl": "Debian: openssl",
    "debootstrap": "Debian: debootstrap",
    "ssh": "Debian: openssh-client",
    "sshd": "Debian: openssh-server",
    "kubectl": "with the extra dev in the environment, but not on the PATH",
    "shellcheck": "with the extra dev in the environment, but not on the PATH",
    "hadolint": "with the extra dev in the environment, but not on the PATH",
    **dict.fromkeys(("slurmctld", "slurmd", "munged"), "Debian: slurm-wlm"),
    **dict.fromkeys(("sbatch", "srun", "squeue", "scancel", "scontrol", "sacct", "sinfo"), "Debian: slurm-client"),
    **dict.fromkeys(("docker", "podman", "sky", "nvidia-smi"), "no test runs it"),
}
"""Name and origin of each program that a fresh machine may lack."""
OF_ENVIRONMENT = {"kubectl", "shellcheck", "hadolint", "scaleray", "mlflow", "ray", "python", "pytest"}
"""Programs that the extra `dev` installs: ordinary dependencies."""
OF_BASE = {
    *("bash", "sh", "git", "make", "cc", "g++", "python", "python3"),
    *("cat", "env", "false", "kill", "ls", "printf", "pwd", "rm", "sleep", "sort", "true"),  # coreutils
    *("mount", "nsenter", "setpriv", "unshare"),  # util-linux
    *("ip", "tc"),  # iproute2; tests of several machines skip without it
}
"""Programs of a base system with git, make and a C++ compiler."""


def program(name: str) -> str | None:
    """Path of a program of these lists: from the environment if `dev` installs it, else from the PATH. None without it."""
    if name not in OF_ENVIRONMENT | OF_BASE | OPTIONAL.keys():
        raise KeyError(f"{name} is on no list of tests/optional_programs.py")
    if name in OF_ENVIRONMENT:
        return shutil.which(name, path=str(Path(sys.executable).parent))
    return shutil.which(name)


def needs(*names: str) -> Any:
    """Mark of a test that runs optional programs. A name with `|` stands for any one of several: `chromium|google-chrome`."""
    import pytest

    for name in names:
        if unknown := set(name.split("|")) - OPTIONAL.keys():
            raise KeyError(f"{', '.join(unknown)}: not in OPTIONAL of tests/optional_programs.py")
    return pytest.mark.optional(*names)


def missing(names: Iterable[str]) -> list[str]:
    """The reason for each name given to `needs` of which no program is installed."""
    return [
        f"{name} is not installed ({OPTIONAL[name.split('|')[0]]})"
        for name in names
        if not any(map(program, name.split("|")))
    ]


def path_without_optional(links: Path, path: str) -> str:
    """A PATH that has all programs but the optional ones: folders with one are replaced by folders of links in `links`.

    The environment's own folder stays: what it has are dependencies.
    """
    own = Path(sys.prefix, "bin").resolve() if sys.prefix != sys.base_prefix else None
    folders: list[str] = []
    for folder in filter(os.path.isdir, path.split(os.pathsep)):
        names = os.listdir(folder)
        if Path(folder).resolve() != own and OPTIONAL.keys() & set(names):
            others = links / str(len(folders))
            others.mkdir()
            for name in set(names) - OPTIONAL.keys():
                (others / name).symlink_to(os.path.abspath(os.path.join(folder, name)))
            folder = str(others)
        folders.append(folder)
    return os.pathsep.join(folders)


if __name__ == "__main__":
    print(path_without_optional(Path(sys.argv[1]), os.environ["PATH"]))
