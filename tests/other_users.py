"""Other users of this machine, for tests of what one user may do with the processes and files of another."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from optional_programs import program

ROOT = Path(__file__).parents[1]
PLACES = (ROOT, Path(sys.prefix), Path(sys.base_prefix))
"""What a user needs to run this code: it may lie below a folder that only its owner may enter."""
SHARED = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
BECOME = """
set -e; umask 022
mount -t tmpfs -o mode=755 tmpfs /mnt
for place in $PLACES; do mkdir -p "/mnt$place"; mount --bind "$place" "/mnt$place"; done
for closed in $CLOSED; do mount --rbind "/mnt$closed" "$closed"; done
unset PLACES CLOSED
exec setpriv --reuid "$0" --regid "$0" --clear-groups --inh-caps=-all "$@"
"""
"""In a view of the files of its own, in which those places can be entered, and nothing beside them."""


@dataclass(frozen=True)
class User:
    """A user whom the machine has no name for. home: a folder of this user alone."""

    uid: int
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a shell of this user, who has never used Ray."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SCALERAY_", "MLFLOW_"))}
        name = {"HOME": str(self.home), "USER": f"user{self.uid}", "LOGNAME": f"user{self.uid}"}
        return {**kept, **name, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "GIT_CEILING_DIRECTORIES": "/"}

    def command(self, *words: str) -> list[str]:
        """The command line that runs these words as this user."""
        closed = {above for place in PLACES if (above := _closed(place))}
        needed = [str(place) for place in PLACES if any(place.is_relative_to(above) for above in closed)]
        of_view = [f"PLACES={' '.join(needed)}", f"CLOSED={' '.join(map(str, closed))}"]
        return ["env", *of_view, "unshare", "--mount", "bash", "-c", BECOME, str(self.uid), *words]

    def run(self, *words: str, timeout: float = 500, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command as this user, in the project's folder."""
        environment = {**self.environment, **variables}
        return subprocess.run(
            self.command(*words), env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout
        )

    def processes(self) -> list[psutil.Process]:
        """All of this user."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.uids().real == self.uid:
                    found.append(process)
        return found

    def files(self) -> list[Path]:
        """Files and folders of this user where everybody has some, other than home."""
        inside = (entry for place in SHARED for entry in os.walk(place))
        found = (Path(folder) / name for folder, folders, files in inside for name in (*folders, *files))
        return [path for path in found if self._owns(path) and not path.is_relative_to(self.home)]

    def _owns(self, path: Path) -> bool:
        with contextlib.suppress(OSError):
            return path.lstat().st_uid == self.uid
        return False


@contextlib.contextmanager
def users(number: int) -> Iterator[list[User]]:
    """So many users; their processes and files are gone with the context. Skips the test where there can be none."""
    if os.name != "posix" or os.geteuid() != 0 or not all(map(program, ("setpriv", "unshare", "bash"))):
        pytest.skip("needs root, setpriv and unshare, to be other users of this machine")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not to be had here")
    found = [User(uid, _home(uid)) for uid in itertools.islice(_free_numbers(), number)]
    try:
        yield found
    finally:
        for user in found:
            for process in user.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            for path in [*user.files(), user.home]:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _home(uid: int) -> Path:
    home = Path(tempfile.mkdtemp(prefix="home-", dir="/tmp"))
    os.chown(home, uid, uid)
    return home


def _free_numbers() -> Iterator[int]:
    """Numbers that no user has."""
    taken = {entry.pw_uid for entry in pwd.getpwall()} | {p.info["uids"].real for p in psutil.process_iter(["uids"])}
    start = 20000 + os.getpid() % 20000
    return (number for number in range(start, start + 1000) if number not in taken)


def _closed(place: Path) -> Path | None:
    """The uppermost folder above this place that others may not enter."""
    above = [folder for folder in reversed(place.resolve().parents) if not folder.stat().st_mode & 0o001]
    return above[0] if above else None
