"""A folder of this user alone, for files that processes share and that no other user may read or write."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""torch's variable: the folder in which it keeps the code that it has compiled, and from which it loads such."""


NAMES = 8
"""Names tried for the folder."""


def short_place() -> Path:
    """Where temporary files get short names: the paths of sockets hold 107 characters."""
    return Path("/tmp") if Path("/tmp").is_dir() else Path(tempfile.gettempdir())


def own_folder() -> Path:
    """The folder, with mode 0700: the same one for all processes of this user. If another user has taken its name, it
    has the next name, and without a free one it is a folder of this process.
    """
    place = short_place()
    if sys.platform == "win32":
        return Path(tempfile.gettempdir())  # of this user there
    for suffix in ("", *(f"-{number}" for number in range(1, NAMES))):
        folder = place / f"scaleray-{os.getuid()}{suffix}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        about = folder.lstat()
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid():
            if stat.S_IMODE(about.st_mode) != 0o700:
                folder.chmod(0o700)
            return folder
    return _folder_of_this_process(place)


def cache_folder(name: str) -> Path:
    """A folder of this user alone on a disk, below XDG_CACHE_HOME or ~/.cache; in `own_folder`, which may be memory, if
    that cannot be written."""
    try:
        place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scaleray" / name
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except (OSError, RuntimeError):  # no home, or one that is read-only
        place = own_folder() / name
        place.mkdir(mode=0o700, exist_ok=True)
    return place


@functools.cache
def _folder_of_this_process(place: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="scaleray-", dir=place))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def keep_compiled_code_here() -> None:
    """Let torch in the processes below this one keep compiled code in this folder, unless the user says where: its own
    has a name in /tmp that another user can take first, with code in it."""
    os.environ.setdefault(COMPILED, f"{own_folder()}/torchinductor")


def plain_executable() -> str:
    """Path of this interpreter without a space: through a link here, where it has one. Ray 2.60 writes the path into
    shell commands as it is, so that workers and the client's server of an environment in `a folder/` would not start.
    """
    if " " not in sys.executable:
        return sys.executable
    executable = Path(sys.executable)
    environment = executable.parent.parent
    link = own_folder() / f"environment-{hashlib.sha256(bytes(environment)).hexdigest()[:16]}"
    with contextlib.suppress(FileExistsError):
        link.symlink_to(environment)
    return str(link / executable.parent.name / executable.name)
