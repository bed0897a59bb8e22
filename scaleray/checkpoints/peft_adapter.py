"""Low-rank adapters in the format of the peft library: adapter_config.json and adapter_model.safetensors.

They are read into, and written from, the adapters of training.setup.fine_tuning, which are parameters `lora_a` and
`lora_b` of the layers themselves. The layout is that of peft's `save_pretrained`; peft itself is not required."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from scaleray.checkpoints.hugging_face import ModelFolder
from scaleray.common.parsing import load_json
from scaleray.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BEFORE = "base_model.model."
"""Prefix that peft adds to the names of the model's own modules."""
OWN = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
"""Last parts of a parameter's name in the model and in peft."""
PLAIN = {"use_dora": False, "bias": "none", "fan_in_fan_out": False, "rank_pattern": {}, "alpha_pattern": {},
         "layer_replication": None, "target_parameters": None}  # fmt: skip
"""Values that peft's config must have for the adapters supported here."""


def is_adapter_folder(where: str) -> bool:
    """Whether this is a local folder that contains a peft adapter."""
    return (Path(where) / CONFIG).is_file()


def load_adapter(tensors: Mapping[str, torch.Tensor], where: str, *, scale: float, is_part: bool = False) -> None:
    """Load a model's adapters, sharded or not, from a peft folder; each rank reads its own part.

    tensors: the trained ones, adapters and whole modules, by their names in the state dict; whole modules may be
    missing from the folder. scale: factor of the adapters. is_part: the tensors are those of a pipeline stage. Raises
    CheckpointError, before any change, for other types of adapters and for adapters of other layers, ranks or scales.
    """
    path = Path(where)
    config = _config(path)
    if not (path / WEIGHTS).is_file():
        raise CheckpointError(
            str(path / WEIGHTS), "missing", "only safetensors is read, never a pickle", "save it with peft again"
        )
    folder = ModelFolder.at(path, config, WEIGHTS)
    names = {own_name(name): name for name in folder.files}
    theirs = _scale(config)
    if not math.isclose(theirs, scale, rel_tol=1e-6):
        raise CheckpointError(
            f"the scale of the adapter in {where}",
            theirs,
            f"the model's is {scale} (fine_tuning.lora_alpha / fine_tuning.lora_rank)",
            f"--fine-tuning.lora-rank {config.get('r')} --fine-tuning.lora-alpha {theirs * int(config['r']):g}",
        )
    other = sorted(names.keys() - tensors.keys()) if not is_part else []
    missing = tensors.keys() - names.keys()
    other = other or sorted(filter(is_of_adapter, missing))
    if other:
        raise CheckpointError(
            f"the adapter's {other[0]}",
            f"only in {where}" if other[0] in names else "only in the model",
            "both must have adapters on the same layers",
            f"fine_tuning.{'lora_layers' if is_of_adapter(other[0]) else 'trained_whole'} must list these: "
            + ", ".join(sorted({_layer(n) for n in names if is_of_adapter(n) == is_of_adapter(other[0])})),
        )
    there = {n: t for n, t in names.items() if not is_part or n in tensors}
    folder.load(tensors, there, optional={n for n in tensors if not is_of_adapter(n)}, is_part=is_part)


def write_adapter(
    tensors: Mapping[str, torch.Tensor],
    folder: Path,
    *,
    alpha: float,
    whole: Iterable[str] = (),
    task: str | None = None,
    base: str | None = None,
) -> None:
    """Write adapters to a folder for `PeftModel.from_pretrained`.

    tensors: `lora_a` and `lora_b` of each layer, by the names of the model's state dict; others are omitted. whole:
    last parts of the names of modules that were trained with the adapters and are also written. alpha: numerator of the
    adapters' scale. task: value of peft's TaskType, such as CAUSAL_LM. base: folder of the model to which they belong.
    """
    from safetensors.torch import save_file

    found = {n: t.detach().cpu().contiguous() for n, t in tensors.items() if is_of_adapter(n)}
    if not found:
        raise CheckpointError.problem(
            "the weights", "have no adapters: there is nothing to export as an adapter", "see fine_tuning.lora_rank"
        )
    rank = next(t.shape[0] for n, t in found.items() if n.endswith("lora_a"))
    config = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[0] for name in found}),
        "modules_to_save": sorted(w for w in whole if any(is_inside(n, [w]) for n in tensors)) or None,
        "inference_mode": True,
        **PLAIN,
    }
    found |= {n: t.detach().cpu().contiguous() for n, t in tensors.items() if is_inside(n, whole)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({peft_name(n): t for n, t in found.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def own_name(name: str) -> str:
    """Name in the model's state dict for a tensor in peft's file."""
    name = name.removeprefix(BEFORE)
    for own, their in OWN.items():
        if name.endswith(f".{their}"):
            return f"{name.removesuffix(their)}{own}"
    return name


def peft_name(name: str) -> str:
    """Name in peft's file for a tensor of the model's state dict."""
    layer, _, last = name.rpartition(".")
    return f"{BEFORE}{layer}.{OWN.get(last, last)}"


def is_of_adapter(name: str) -> bool:
    """Whether a tensor with this name in a state dict belongs to an adapter."""
    return name.rpartition(".")[2] in OWN


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a tensor with this name is in a module whose name is, or ends with, one of these."""
    return any(f".{words}." in f".{name}" for words in modules)


def _layer(name: str) -> str:
    """Last part of the name of an adapter's layer."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _config(path: Path) -> dict[str, Any]:
    try:
        config = load_json((path / CONFIG).read_text())
    except (OSError, ValueError) as exc:
        raise CheckpointError(str(path / CONFIG), f"not readable ({exc})", "it must describe the adapter") from exc
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        found = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise CheckpointError(
            f"peft_type of {path / CONFIG}",
            found,
            "only LORA can be loaded as adapters of fine_tuning",
            "wrap the model with peft in build_model() for other kinds",
        )
    if not isinstance(config.get("r"), int) or not isinstance(config.get("lora_alpha"), int | float):
        raise CheckpointError.problem(
            str(path / CONFIG), "lacks r or lora_alpha: the adapter's scale follows from them"
        )
    for key, value in PLAIN.items():
        if config.get(key, value) not in (value, value or None):
            raise CheckpointError(
                f"{key} of {path / CONFIG}", config[key], f"fine_tuning's adapters have {value!r}",
                "wrap the model with peft in build_model() instead",
            )  # fmt: skip
    return config


def _scale(config: Mapping[str, Any]) -> float:
    rank = int(config["r"])
    return float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)
