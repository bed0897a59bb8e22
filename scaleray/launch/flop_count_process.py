"""Count the cost of one sample of a config's workload in a separate process, so that the planner need not import torch.

python -m scaleray.launch.flop_count_process CONFIG    prints the profile as JSON

Standard input holds the config's command-line settings as a JSON list, since they may include a password, which must
not be visible in the process list."""

import contextlib
import json
import sys
from pathlib import Path

import numpy as np

from scaleray.config import load_config
from scaleray.config.loading import without_degrees
from scaleray.data import TRAIN, load_sources
from scaleray.data.source_interface import Source
from scaleray.errors import ScaleRayError
from scaleray.training.flop_counter import profile_workload
from scaleray.workload import load_workload, no_exit

NUM_ROWS = 4


def main(arguments: list[str]) -> int:
    """Print the profile; errors go to stderr in one message."""
    path = Path(arguments[0])
    try:
        config = load_config(path, flags=json.load(sys.stdin), planned=without_degrees)
        with contextlib.redirect_stdout(sys.stderr):  # what a workload prints must not mix with the answer
            workload = load_workload(config.workload.name, config.workload.args, base_dir=path.resolve().parent)
            with no_exit("the workload's code"):
                source = load_sources(workload, in_steps=True)[TRAIN]
                profile = profile_workload(
                    workload, _rows(source), config.precision, gives_tuples=bool(getattr(source, "gives_tuples", False))
                )
    except ScaleRayError as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return exc.exit_code
    print(profile.to_json())
    return 0


def _rows(source: Source) -> dict[str, np.ndarray]:
    return source.read(np.arange(min(NUM_ROWS, source.num_rows)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
