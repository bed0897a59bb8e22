"""The filesystem of a path or a URI."""

from __future__ import annotations

import ast
import errno
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import scaleray
from scaleray.checkpoints.storage import Store
from scaleray.common.filesystems import lock, open_filesystem, unlock, write_whole

SOURCE = Path(scaleray.__file__).parent


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_folder_may_have_a_space_in_its_name(tmp_path, prefix):
    folder = tmp_path / "a folder"
    folder.mkdir()
    filesystem, path = open_filesystem(f"{prefix}{folder}")
    assert path == str(folder) and filesystem.get_file_info(path).type.name == "Directory"


@pytest.mark.parametrize(
    ("address", "mode", "parents_mode", "kind", "written"),
    [
        ("http://server:5000", 0o755, 0o755, "ext4", 0o600),
        ("sqlite:////runs.db", 0o755, 0o755, "ext4", 0o644),
        ("http://server:5000", 0o775, 0o755, "ext4", 0o644),
        ("http://server:5000", 0o755, 0o2755, "ext4", 0o644),
        ("http://server:5000", 0o755, 0o755, "nfs4", 0o644),
    ],
)
def test_records_with_the_address_of_a_server_are_for_their_user_unless_the_folder_is_shared(
    address, mode, parents_mode, kind, written, tmp_path, monkeypatch
):
    mount = SimpleNamespace(mountpoint=str(tmp_path), fstype=kind)
    monkeypatch.setattr("psutil.disk_partitions", lambda all: [mount])
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    for place, bits in ((folder, mode), (folder.parent, parents_mode)):
        place.chmod(bits)
    before = os.umask(0o022)
    try:
        Store(str(folder)).write_record("record.json", "{}", address)
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "record.json").stat().st_mode) == written


def is_free(place):
    """Whether another process gets the lock on a file."""
    statement = f"from scaleray.common.filesystems import lock\nprint(lock(open({str(place)!r}, 'a')))"
    return (
        subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=True).stdout == "True\n"
    )


def test_a_lock_is_held_by_every_process_that_has_the_file(tmp_path):
    place = tmp_path / "lock"
    with place.open("a") as file:
        assert lock(file) and not is_free(place)
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[file.fileno()])
    assert not is_free(place), "its child has the file"
    child.communicate()
    with place.open("a") as file, place.open() as reader:
        assert lock(file) and not lock(reader, is_shared=True)
        unlock(file)
        assert lock(reader, is_shared=True) and not lock(file)


def test_a_file_that_cannot_be_locked_is_not_one_in_use(tmp_path, monkeypatch):
    def refused(file, kind):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refused)
    with (tmp_path / "lock").open("a") as file, pytest.raises(OSError, match="No locks available"):
        lock(file)


def test_a_whole_write_replaces_what_a_killed_process_left(tmp_path):
    part = tmp_path / ".a.part"
    part.write_text("left")
    part.chmod(0o400)
    write_whole(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new" and not part.exists()


def written_in_place(package):
    """Places where a package writes a file by a method of Path: a Store's has the file's name as an argument too."""
    for file in sorted((SOURCE / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            method = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if method in ("write_text", "write_bytes") and len(node.args) == 1:
                yield f"{file.relative_to(SOURCE)}:{node.lineno}"


@pytest.mark.parametrize("package", ["recording", "records", "release", "sweeps", "verification"])
def test_records_are_written_whole(package):
    assert list(written_in_place(package)) == []
