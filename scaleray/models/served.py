"""A packed model as an MLflow model, for `mlflow models serve` and `mlflow.pyfunc.load_model`.

MLflow finds `_load_pyfunc` by the name of this module, so that no part of the model is pickled."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scaleray.models.fetched import check_served
from scaleray.models.load import find_parts
from scaleray.models.packed import RowAnswers, read_shape

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

NEEDS = ("scaleray", "torch", "numpy", "pyarrow")
"""Packages that a server needs in addition to the workload's imports."""


class ServedModel:
    """The model that MLflow calls for each request."""

    def __init__(self, folder: Path) -> None:
        parts = find_parts(folder)
        self._answer = RowAnswers(parts, *read_shape(folder, parts.workload))

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Predictions by name. model_input: a mapping of arrays by column, or a pandas table."""
        names = getattr(model_input, "columns", model_input)
        return self._answer({str(name): np.asarray(model_input[name]) for name in names})


def _load_pyfunc(data_path: str) -> ServedModel:
    """MLflow's entry point. data_path: the packed model's folder. Raises TrackingError if the model was changed."""
    import mlflow

    check_served(Path(data_path), uri=mlflow.get_registry_uri())
    return ServedModel(Path(data_path))


def save_for_mlflow(signature: ModelSignature, folder: Path, out: Path, *, libraries: Mapping[str, str]) -> None:
    """Write an MLflow model to a new folder. folder, signature: of the packed model; libraries: the training's
    versions, by name; the server gets those that it needs."""
    import mlflow.pyfunc

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*input example was not provided")  # rows of training stay at home
        mlflow.pyfunc.save_model(
            str(out),
            loader_module=__name__,
            data_path=str(folder),
            signature=signature,
            pip_requirements=_requirements(libraries),
        )


def _requirements(libraries: Mapping[str, str]) -> list[str]:
    """Exact versions, without local build tags such as `+cpu`, which no index has."""
    from mlflow import __version__ as mlflow_version

    versions = {**libraries, "mlflow": mlflow_version}
    for name in NEEDS:
        versions.setdefault(name, metadata.version(name))
    wanted = [name for name in ("mlflow", *NEEDS) if name in versions]
    return [f"{name}=={versions[name].partition('+')[0]}" for name in wanted]
