"""The filesystem of a path or a URI."""

from __future__ import annotations

import pytest

from scaleray.filesystems import open_filesystem


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_folder_may_have_a_space_in_its_name(tmp_path, prefix):
    folder = tmp_path / "a folder"
    folder.mkdir()
    filesystem, path = open_filesystem(f"{prefix}{folder}")
    assert path == str(folder) and filesystem.get_file_info(path).type.name == "Directory"
