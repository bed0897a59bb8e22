"""Names of the files in a folder of weights in Hugging Face's layout, and its detection."""

from __future__ import annotations

from pathlib import Path

from scaleray.errors import UsageError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
WRITTEN_BY = "scaleray"
"""Value of `written_by` in the index's metadata: names in the files are then the model's own."""
FINAL_WEIGHTS = "weights"
"""Name of a run's final weights: the folder that holds those of a sharded model, and the beginning of `PLAIN`. If the
run averages its weights, they are the average."""
TRAINED_WEIGHTS = "trained_weights"
"""Name of the trained weights, if there is an average of them as well."""

ADAPTERS = "adapters"
"""Name of the low-rank adapters of a run whose final weights have them added."""


def plain_file(name: str) -> str:
    """File of a run that holds weights of this name, of a model that is whole on one worker."""
    return f"{name}.pt"


PLAIN = plain_file(FINAL_WEIGHTS)
AVERAGED, TRAINED = "averaged", "trained"
"""Choice of weights of a run with `averaging`: the average, or the trained ones."""


def check_which(which: str | None, *, has_average: bool, where: str) -> None:
    """Raise UsageError for a choice of weights that there is not."""
    if which not in (None, AVERAGED, TRAINED):
        raise UsageError("--weights", which, f"it must be {AVERAGED} or {TRAINED}")
    if which == AVERAGED and not has_average:
        raise UsageError(
            "--weights", which, f"{where} has no average of its weights", "train with averaging.decay, or leave it out"
        )


def is_model_folder(where: str) -> bool:
    """Whether this is a local folder with weights in that layout."""
    return any((Path(where) / name).is_file() for name in (WEIGHTS, INDEX))
