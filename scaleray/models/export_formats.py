"""Export formats: each writes a file, and opens it again as a function that answers the same call."""

import contextlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scaleray.common.installed import install_command
from scaleray.errors import UsageError, WorkloadError, first_line
from scaleray.models.model_call import ModelCall
from scaleray.workload import user_traceback

Opened = Callable[[ModelCall], list[torch.Tensor]]
"""Function of an opened file: returns its outputs for a call of the model."""
ONNX = ("onnx", "onnxscript", "onnxruntime")
LARGEST_ONNX_BYTES = 2**31
"""Largest size of an ONNX file, whose format counts bytes in 32 bits."""


def write_safetensors(module: nn.Module, call: ModelCall, file: Path, about: dict[str, str]) -> None:
    """Write only the weights; tied weights have a single name."""
    from safetensors.torch import save_model

    del call
    save_model(module, str(file), metadata=about)


def open_safetensors(file: Path, fresh: Callable[[], nn.Module]) -> Opened:
    """Open the weights in a newly built model."""
    from safetensors.torch import load_model

    module = fresh()
    load_model(module, str(file))
    module.eval()
    return lambda call: call(module)


def write_program(module: nn.Module, call: ModelCall, file: Path, about: dict[str, str]) -> None:
    """Write weights and computation, without the model's code."""
    torch.export.save(_program(module, call), str(file), extra_files={"scaleray.txt": str(about)})


def open_program(file: Path, fresh: Callable[[], nn.Module]) -> Opened:
    """Open the program, which runs without the model's code."""
    del fresh
    module = torch.export.load(str(file)).module()
    return lambda call: call(module)


def write_onnx(module: nn.Module, call: ModelCall, file: Path, about: dict[str, str]) -> None:
    """Write weights and computation to one file, for onnxruntime and other programs."""
    check_onnx()
    size = sum(tensor.nbytes for tensor in module.state_dict().values() if isinstance(tensor, torch.Tensor))
    if size >= LARGEST_ONNX_BYTES:
        raise UsageError("--format", "onnx", f"the weights are {size / 2**30:.1f} GiB, above ONNX's 2 GiB per file",
                         "use --format torch.export")  # fmt: skip
    more: dict[str, Any] = {"kwargs": call.kwargs, "dynamic_shapes": call.shapes(module), "external_data": False}
    export = lambda: torch.onnx.export(module, call.args, dynamo=True, verbose=False, **more)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # which names every library that it could translate too
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own translations
        made = _followed(export, module, "torch.onnx")
    made.model.metadata_props.update(about)
    made.save(str(file), external_data=False)


def open_onnx(file: Path, fresh: Callable[[], nn.Module]) -> Opened:
    """Open the file with onnxruntime on the CPU."""
    import onnxruntime

    del fresh
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def ask(call: ModelCall) -> list[torch.Tensor]:
        given = {name: tensor.numpy() for name, tensor in zip(names, call.tensors, strict=True)}
        return [torch.from_numpy(value) for value in session.run(None, given)]

    return ask


def check_onnx() -> None:
    """Raise UsageError if a library for ONNX is not installed."""
    if missing := [name for name in ONNX if importlib.util.find_spec(name) is None]:
        raise UsageError("--format", "onnx", f"it needs {', '.join(missing)}", install_command("onnx"))


def _program(module: nn.Module, call: ModelCall) -> Any:
    """The module traced by `torch.export`, for any number of rows if possible."""
    shapes = call.shapes(module)
    return _followed(
        lambda: torch.export.export(module, call.args, call.kwargs, dynamic_shapes=shapes), module, "torch.export"
    )


def _followed(export: Callable[[], Any], module: nn.Module, by: str) -> Any:
    try:
        with torch.no_grad():
            return export()
    except Exception as exc:
        raise WorkloadError(
            "the model",
            type(module).__name__,
            f"{by} cannot trace its forward(): {first_line(exc)}",
            f"--format safetensors needs no tracing\n  {user_traceback(exc)}",
        ) from exc
