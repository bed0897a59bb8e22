"""Files of clusters are written and run in folders with a space in their names."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """A folder with a space in its name, as users have."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    return folder
