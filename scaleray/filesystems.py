"""The filesystem that a path or a URI is on, through pyarrow, which Ray uses too."""

from __future__ import annotations

from typing import Any


def open_filesystem(path: str) -> tuple[Any, str]:
    """The filesystem of an absolute path or a URI such as s3://bucket/prefix, and the path within it.

    Raises OSError, or ValueError for a URI of an unknown kind.
    """
    import pyarrow.fs

    if "://" not in path:  # not from_uri, which would take a '?' or '%20' in a path for its own
        return pyarrow.fs.LocalFileSystem(), path.rstrip("/")
    return pyarrow.fs.FileSystem.from_uri(path.replace(" ", "%20"))  # a folder's name may have one, a URI may not
