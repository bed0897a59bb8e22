"""File names in a folder of weights in Hugging Face's layout, and detection of this layout."""

from pathlib import Path

from scaleray.errors import UsageError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
WRITTEN_BY = "scaleray"
"""Value of `written_by` in the index's metadata if the names in the files are the model's own."""
FINAL_WEIGHTS = "weights"
"""Name of a run's final weights: the folder of a sharded model's weights, and the stem of `PLAIN`. If the run averages
its weights, these are the average."""
TRAINED_WEIGHTS = "trained_weights"
"""Name of the trained weights if there is also an average of them."""

ADAPTERS = "adapters"
"""Name of the low-rank adapters of a run whose final weights include them."""


def plain_file(name: str) -> str:
    """File for weights of this name in a run whose model is whole on each worker."""
    return f"{name}.pt"


PLAIN = plain_file(FINAL_WEIGHTS)
AVERAGED, TRAINED = "averaged", "trained"
"""Choice of weights of a run with `averaging`: the average, or the trained ones."""


def check_which(which: str | None, *, has_average: bool, where: str) -> None:
    """Raise UsageError for an unknown choice of weights."""
    if which not in (None, AVERAGED, TRAINED):
        raise UsageError("--weights", which, f"it must be {AVERAGED} or {TRAINED}")
    if which == AVERAGED and not has_average:
        raise UsageError(
            "--weights",
            which,
            f"{where} has no average of its weights",
            "train with averaging.decay, or omit --weights",
        )


def is_model_folder(where: str) -> bool:
    """Whether this is a local folder with weights in that layout."""
    return any((Path(where) / name).is_file() for name in (WEIGHTS, INDEX))
