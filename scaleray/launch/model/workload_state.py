"""The state of a workload next to the weights of a packed model: JSON, and its tensors as safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from scaleray.checkpoints.storage import Store
from scaleray.parsing import load_json
from scaleray.training.state.items import WORKLOAD, as_json, flattened, nested

VALUES, TENSORS = "workload_state.json", "workload_state.safetensors"


def write_state(state: Mapping[str, Any], folder: Path) -> None:
    """Write what a workload's `state_dict` gave. Raises WorkloadError for what a checkpoint could not hold either."""
    flat = flattened(state)
    tensors = {name: value.contiguous() for name, value in flat.items() if isinstance(value, torch.Tensor)}
    values = {name: as_json(WORKLOAD, value) for name, value in flat.items() if name not in tensors}
    (folder / VALUES).write_text(json.dumps(values))
    if tensors:
        from safetensors.torch import save_file

        save_file(tensors, folder / TENSORS)


def read_state(folder: Store) -> dict[str, Any] | None:
    """The state in a local folder; None where it has none. Raises OSError or ValueError for a damaged one."""
    if not folder.is_local or folder.size(VALUES) is None:
        return None
    flat: dict[str, Any] = dict(load_json(folder.read(VALUES)))
    if folder.size(TENSORS) is not None:
        from safetensors.torch import load_file

        flat.update(load_file(Path(folder.root) / TENSORS))
    return nested(flat)
