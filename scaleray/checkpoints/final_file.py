"""Final weights of a run in a single file, with the same interface as the model in a checkpoint."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.model_layout import PLAIN
from scaleray.checkpoints.storage import Store
from scaleray.checkpoints.weight_files import load_torch
from scaleray.checkpoints.weight_sums import check_weights
from scaleray.errors import CheckpointError


@dataclass(frozen=True)
class FinalFile:
    """Tensors in a file of final weights. path: local, or a URI."""

    path: str
    tensors: dict[str, torch.Tensor]

    @classmethod
    def read(cls, run: Store, file: str, *, recorded: Mapping[str, Any] | None = None) -> FinalFile:
        """Read a file and check it against its recorded hash, see `check_weights`. Raises CheckpointError."""
        check_weights(run, [file], recorded=recorded)
        path, what = run.path(file), "the file of final weights"
        try:
            content = io.BytesIO(run.read(file))
        except OSError as exc:
            raise CheckpointError(what, path, f"it cannot be read: {exc}", "copy it again") from exc
        state = load_torch(path, content, what=what)
        if not isinstance(state, Mapping) or not state or not all(isinstance(name, str) for name in state):
            found = "a mapping without text keys" if isinstance(state, Mapping) else type(state).__name__
            raise CheckpointError.problem(f"{what} {path}", f"must contain a mapping of names to tensors, not {found}")
        return cls(path, {name: value for name, value in state.items() if isinstance(value, torch.Tensor)})

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor, on the CPU."""
        return self.tensors[name]


def final_file(run_path: str) -> FinalFile | None:
    """Return the final weights of a run without checkpoints, such as a short one; None if it has some, or no such file.

    Raises CheckpointError for a damaged file, and OSError if the folder cannot be read."""
    store = Store(run_path)
    if PLAIN not in store.names() or Catalog.at(run_path)[0].newest() is not None:
        return None
    return FinalFile.read(store, PLAIN)
