"""The final weights as one plain file: a state dict that `torch.load(..., weights_only=True)` reads."""

from __future__ import annotations

import io
from typing import Any

import torch


def save_weights(weights: dict[str, Any], path: str) -> None:
    """Write a state dict to a local path or an s3:// URI."""
    if "://" not in path:
        torch.save(weights, path)
        return
    import pyarrow.fs

    buffer = io.BytesIO()
    torch.save(weights, buffer)
    filesystem, inner = pyarrow.fs.FileSystem.from_uri(path)
    with filesystem.open_output_stream(inner) as stream:
        stream.write(buffer.getvalue())
