"""Private folder of this user, for files that its processes share and other users must not read or write."""

import atexit
import contextlib
import functools
import getpass
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""torch's environment variable for the folder in which it stores compiled code and from which it loads it."""


NAMES = 8
"""Maximum number of names tried for the folder."""


def short_path() -> Path:
    """Folder for temporary files with short paths, since paths of sockets have at most 107 characters."""
    return Path("/tmp") if Path("/tmp").is_dir() else Path(tempfile.gettempdir())


def own_folder() -> Path:
    """Return the folder, with mode 0700, which all processes of this user share. If another user owns its name, the
    next name is used; if none is free, a folder for this process alone.
    """
    parent = short_path()
    if sys.platform == "win32":
        return Path(tempfile.gettempdir())  # of this user there
    for suffix in ("", *(f"-{number}" for number in range(1, NAMES))):
        folder = parent / f"scaleray-{os.getuid()}{suffix}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        about = folder.lstat()
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid():
            if stat.S_IMODE(about.st_mode) != 0o700:
                folder.chmod(0o700)
            return folder
    return _folder_of_this_process(parent)


def cache_folder(name: str) -> Path:
    """Return a private folder of this user on disk, in XDG_CACHE_HOME or ~/.cache, or, if that is not writable, in
    `own_folder`, which may be in memory."""
    try:
        parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scaleray" / name
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=parent).close()
    except (OSError, RuntimeError):  # no home, or a read-only one
        parent = own_folder() / name
        parent.mkdir(mode=0o700, exist_ok=True)
    return parent


@functools.cache
def _folder_of_this_process(parent: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="scaleray-", dir=parent))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def keep_compiled_code_here() -> None:
    """Make torch in child processes store compiled code in this folder, unless the user sets another. Its default is a
    name in /tmp that another user could take first and fill with code."""
    os.environ.setdefault(COMPILED, f"{own_folder()}/torchinductor")


def plain_executable() -> str:
    """Path of this interpreter without a space, through a link in this folder if necessary. Ray 2.60 inserts the path
    into shell commands unquoted, so workers and Ray Client servers of an environment in `a folder/` would not start.
    """
    if " " not in sys.executable:
        return sys.executable
    executable = Path(sys.executable)
    environment = executable.parent.parent
    link = own_folder() / f"environment-{hashlib.sha256(bytes(environment)).hexdigest()[:16]}"
    with contextlib.suppress(FileExistsError):
        link.symlink_to(environment)
    return str(link / executable.parent.name / executable.name)


SOMEBODY = "somebody"


def user_name() -> str | None:
    """The user's name; None if there is none, as in a container that runs under a bare user id."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return None


def user_or_somebody() -> str:
    """The user's name, or a placeholder for a user without one."""
    return user_name() or SOMEBODY
