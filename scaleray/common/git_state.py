"""Commit of the code and differences from it, in a checkout or in the one from which a job was submitted."""

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scaleray.common.parsing import load_json

LARGEST_HASHED_BYTES = 2**24  # of larger files only the size counts: data next to the code must not delay every start
SENT = ".scaleray-git.json"
"""File with the sender's state and hashes of the sent files, in the package of a submitted job, which has no `.git`."""
STATE = ("commit", "is_dirty", "diff_sha256")


def git_state(folder: Path) -> dict[str, Any]:
    """Commit of the checkout around `folder`, and a hash of the differences from it.

    Outside a checkout, this is the state sent with a submitted job, or the commit in GIT_COMMIT, if set.
    """

    def git(*words: str) -> bytes:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=True, timeout=20).stdout

    try:
        commit = git("rev-parse", "HEAD").decode().strip()
        new_files = git("ls-files", "-z", "--others", "--exclude-standard").split(b"\0")
        difference = git("diff", "HEAD") + b"".join(_content(folder, name) for name in new_files if name)
    except (OSError, subprocess.SubprocessError):
        commit = os.environ.get("GIT_COMMIT", "")
        return _sent(folder) or ({"commit": commit, "is_dirty": None, "diff_sha256": None} if commit else {})
    return {
        "commit": commit,
        "is_dirty": bool(difference),
        "diff_sha256": hashlib.sha256(difference).hexdigest() if difference else None,
    }


def state_to_send(folder: Path, names: Iterable[str]) -> str:
    """Return the text of the file SENT for a package of these files in the folder; empty if no commit is known."""
    if not (state := git_state(folder)):
        return ""
    files = sorted({*names} - {SENT})
    return json.dumps({"git": state, "files": files, "sha256": _hash(folder, files)})


def _sent(folder: Path) -> dict[str, Any]:
    """State of the package around `folder` when it was sent; files that changed since then make it dirty. {} outside
    packages."""
    places = (folder.absolute(), *folder.absolute().parents)
    if (top := next((one for one in places if (one / SENT).is_file()), None)) is None:
        return {}
    try:
        sent = load_json((top / SENT).read_bytes())
        state, digest = {key: sent["git"][key] for key in STATE}, _hash(top, sent["files"])
    except (OSError, ValueError, KeyError, TypeError):  # an unrelated file of this name
        return {}
    return state if digest == sent["sha256"] else {**state, "is_dirty": True, "diff_sha256": digest}


def _hash(folder: Path, names: Iterable[str]) -> str:
    return hashlib.sha256(b"".join(_content(folder, os.fsencode(name)) for name in names)).hexdigest()


def _content(folder: Path, name: bytes) -> bytes:
    """A file's name and a hash of its content, or its size if it is large."""
    path = folder / os.fsdecode(name)
    if not path.is_file():
        return name
    size = path.stat().st_size
    content = hashlib.sha256(path.read_bytes()).digest() if size <= LARGEST_HASHED_BYTES else str(size).encode()
    return name + b"\0" + content
