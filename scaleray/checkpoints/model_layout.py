"""Names of the files in a folder of weights in Hugging Face's layout, and how such a folder is known."""

from __future__ import annotations

from pathlib import Path

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
WRITTEN_BY = "scaleray"
"""Value of `written_by` in the index's metadata: names in the files are then the model's own."""
PLAIN = "weights.pt"
"""File of a run that holds the final weights of a model that is whole on one worker."""
FINAL_WEIGHTS = "weights"
"""Folder of a run that holds the final weights of a sharded model."""


def is_model_folder(where: str) -> bool:
    """Whether this is a local folder with weights in that layout."""
    return any((Path(where) / name).is_file() for name in (WEIGHTS, INDEX))
