"""The final weights of a run in their one file, read as a checkpoint's model is."""

from __future__ import annotations

import io
from dataclasses import dataclass

import torch

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.manifest import Tensor
from scaleray.checkpoints.model_layout import FINAL_WEIGHTS, plain_file
from scaleray.checkpoints.storage import Store
from scaleray.errors import CheckpointError, first_line


@dataclass(frozen=True)
class FinalFile:
    """The tensors of such a file. path: local, or a URI."""

    path: str
    tensors: dict[str, torch.Tensor]

    def shapes(self) -> dict[str, Tensor]:
        """Shape and dtype of each tensor."""
        return {
            name: Tensor(str(value.dtype).removeprefix("torch."), tuple(value.shape), ())
            for name, value in self.tensors.items()
        }

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        return self.tensors[name]


def final_file(run_path: str, name: str = FINAL_WEIGHTS) -> FinalFile | None:
    """The weights of this name of a run that left no checkpoint, as a short one does; None where it has one, or no such
    file.

    Raises CheckpointError for a damaged file, and OSError where the folder cannot be read.
    """
    store = Store(run_path)
    file = plain_file(name)
    if store.size(file) is None or Catalog.at(run_path)[0].newest() is not None:
        return None
    path = store.path(file)
    try:
        state = torch.load(io.BytesIO(store.read(file)), weights_only=True, map_location="cpu")
        return FinalFile(path, {name: value for name, value in state.items() if isinstance(value, torch.Tensor)})
    except OSError:
        raise
    except Exception as exc:  # whatever torch raises at bytes that are no archive of tensors
        raise CheckpointError(
            "the final weights", path, f"they cannot be read: {first_line(exc)}", "resume the run to write them anew"
        ) from exc
