"""Models of transformers from a config or a local folder: class, config and weights, if any. Only safetensors files are
read, no code in a folder is run, and nothing is downloaded."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scaleray.checkpoints.model_layout import CONFIG, is_model_folder
from scaleray.common.installed import library
from scaleray.common.parsing import load_json
from scaleray.errors import WorkloadError, first_line
from scaleray.parallel.experts import divisible_experts

EXTRA = "hugging-face"
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every `from_pretrained`: no network access, and no code from a folder."""


def transformers() -> Any:
    """Return the library transformers. Raises WorkloadError if it is missing."""
    return library("transformers", extra=EXTRA, wanted_by="scaleray.hugging_face")


def peft() -> Any:
    """Return the library peft. Raises WorkloadError if it is missing."""
    return library("peft", extra=EXTRA, wanted_by="the argument peft of a workload")


RUN = "run.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def absolute(model: Any) -> Any:
    """Make the path in the argument `model` absolute, as workers run in other folders. Raises WorkloadError if it is
    neither a mapping nor on this machine."""
    if isinstance(model, Mapping):
        return dict(model)
    path = Path(str(model)).expanduser().absolute()
    if not path.exists():
        raise WorkloadError(
            "workload.args.model",
            model,
            "it must be a folder, a JSON file or a mapping with model_type",
            "nothing is downloaded from a hub: copy the model's folder to a location accessible to every worker",
        )
    if (path / RUN).is_file() and not (path / CONFIG).is_file():
        raise WorkloadError(
            "workload.args.model",
            model,
            "it is a scaleray run, which transformers cannot read",
            f"scaleray export {model} --out FOLDER writes a folder that it can read",
        )
    return str(path)


def model_folder(model: Any) -> str | None:
    """Folder with weights given by the argument `model`; None for a config alone. Raises WorkloadError for weights in
    an unsupported format."""
    if isinstance(model, Mapping) or Path(model).is_file():
        return None
    if is_model_folder(model):
        return str(model)
    pickles = sorted(path.name for pattern in PICKLES for path in Path(model).glob(pattern))
    if pickles:
        raise WorkloadError.problem(
            "workload.args.model",
            f"has {pickles[0]}: only safetensors files are read, as a pickle may run any code",
            "convert it where you trust it: model.save_pretrained(folder) writes model.safetensors",
        )
    return None


def read_config(model: Any, changes: Mapping[str, Any]) -> Any:
    """Return the config given by the argument `model`, with `changes` applied. Raises WorkloadError."""
    library = transformers()
    stated: Any = model
    if not isinstance(stated, Mapping):
        path = Path(stated)
        file = path if path.is_file() else path / CONFIG
        if not file.is_file():
            there = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
            raise WorkloadError.problem("workload.args.model", f"{path} has no {CONFIG}", f"it contains: {there}")
        try:
            stated = load_json(file.read_text())
        except (OSError, ValueError) as exc:
            raise WorkloadError.problem(f"{file}", f"cannot be read as a config in JSON: {exc}") from exc
    if not isinstance(stated, Mapping) or not isinstance(stated.get("model_type"), str):
        raise WorkloadError(
            "model_type of workload.args.model",
            stated.get("model_type") if isinstance(stated, Mapping) else type(stated).__name__,
            "it must name a type of model",
            'for example {"model_type": "gpt2", "n_layer": 4}',
        )
    known = library.CONFIG_MAPPING
    kind = stated["model_type"]
    if kind not in known:
        raise WorkloadError(
            "model_type of workload.args.model",
            kind,
            f"transformers {library.__version__} has no such model",
            "code in a model's folder is not run: write build_model() in a subclass of HuggingFaceWorkload",
        )
    values = {key: value for key, value in {**stated, **changes}.items() if key not in ("model_type", "auto_map")}
    try:
        return known[kind].from_dict(values)
    except Exception as exc:
        raise WorkloadError.problem("workload.args.model", f"is rejected by {kind}: {first_line(exc)}") from exc


def build(auto_class: str, config: Any, folder: str | None, *, attention: str | None) -> nn.Module:
    """Build a float32 model in training mode: with the folder's weights, or randomly initialised.

    auto_class: name in transformers, such as AutoModelForCausalLM. Parts that the folder lacks, such as a new head, are
    randomly initialised. Raises WorkloadError if the class has no model of this type, or if the weights do not fit.
    """
    if getattr(config, "output_router_logits", False):
        raise WorkloadError.problem(
            "workload.args.model",
            "sets output_router_logits: transformers computes the balance loss on a worker's batch, which would make "
            "the training depend on the number of workers",
            "omit it; the router is then trained only by the loss",
        )
    transformers().logging.disable_progress_bar()
    factory = getattr(transformers(), auto_class)
    options: dict[str, Any] = {"dtype": torch.float32}
    if attention is not None:
        options["attn_implementation"] = attention
    try:
        if folder is None:
            model: nn.Module = factory.from_config(config, trust_remote_code=False, **options)
        else:
            model = _read(factory, folder, config=config, **options)
    except (ValueError, RuntimeError, OSError, ImportError, KeyError) as exc:
        if isinstance(exc, torch.OutOfMemoryError):
            raise
        source = f"the folder {folder}" if folder else f"a config of {config.model_type}"
        raise WorkloadError(
            "workload.args.model", source, f"{auto_class} cannot create a model from it: {first_line(exc)}"
        ) from exc
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # recomputing a block would fill a cache again
    divisible_experts(model)
    return model.train()


def _read(factory: Any, folder: str, **options: Any) -> nn.Module:
    """Return the model with a folder's weights. Randomly initialised parts are reported in one line instead of
    transformers' table in every process."""
    logging = transformers().logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, about = factory.from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, **LOCAL, **options
        )
    finally:
        logging.set_verbosity(before)
    if drawn := sorted(about.get("missing_keys", ())):
        warnings.warn(f"initialised at random, as {folder} lacks them: {', '.join(drawn[:4])}", stacklevel=2)
    found: nn.Module = model
    return found


def image_statistics(folder: str | None) -> dict[str, Any]:
    """Mean and standard deviation of the channels in a model's folder; empty if it has none."""
    path = Path(folder or "") / "preprocessor_config.json"
    if folder is None or not path.is_file():
        return {}
    try:
        stated = load_json(path.read_text())
    except (OSError, ValueError) as exc:
        raise WorkloadError.problem(f"{path}", f"cannot be read as JSON: {exc}") from exc
    names = {"mean": "image_mean", "std": "image_std"}
    return {name: stated[theirs] for name, theirs in names.items() if stated.get(theirs)}
