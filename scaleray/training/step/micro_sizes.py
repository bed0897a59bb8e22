"""Number of rows in a micro-batch if it differs from the config's: found by trials, or halved after memory ran out."""

import contextlib
from collections.abc import Callable
from typing import Any

from scaleray.config import RunConfig
from scaleray.config.recipe.values import Recipe, with_micro_size
from scaleray.data import RankBatch
from scaleray.records.phases import Phase
from scaleray.training.health.reporter import Reporter
from scaleray.training.setup.compilation import eagerly
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.step import micro_batch_finder


class MicroSizes:
    """Number of rows in a micro-batch if it differs from the config's.

    now: number of rows; None means the config's. search: the trials, for the summary."""

    def __init__(self, config: RunConfig, place: RankContext, reporter: Reporter) -> None:
        self.config, self.place, self.reporter = config, place, reporter
        self.now: int | None = None
        self.search: dict[str, Any] = {}

    def most_before_search(self, recipe: Recipe) -> int:
        """Number of rows in a micro-batch that is certain to fit: two until the size has been found, since the config's
        may be too large."""
        most = 2 if self.config.memory.find_micro_size else recipe.micro_batch_size
        return min(most, self.now or most)

    def settle(
        self,
        recipe: Recipe,
        workload: Any,
        setup: Setup,
        first: RankBatch,
        *,
        gives_tuples: bool,
        enter: Callable[[Phase], object],
    ) -> Recipe | None:
        """Recipe to train with, if not the config's: as before the interruption, or found now. Collective."""
        known = self.now
        if known is not None and recipe.per_worker_batch_size % known == 0 and known <= recipe.micro_batch_size:
            return with_micro_size(recipe, known, why="as before the interruption")
        if not self.config.memory.find_micro_size:
            return None
        # tensors inside compiled code cannot be counted
        is_counted = setup.compilation is not None and self.place.device.type == "cpu"
        with eagerly() if is_counted else contextlib.nullcontext():
            found = micro_batch_finder.find(
                workload, setup, self.config, recipe, self.place, first, gives_tuples=gives_tuples, enter=enter
            )
        self.search = {"micro_batch": found.values()}
        self.reporter.forget_bytes()
        self.reporter.say(str(found))
        return with_micro_size(recipe, found.micro_batch_size, why="found before the first step")

    def say_halved(self, before: Recipe, after: Recipe, *, step: int) -> None:
        """Log that memory ran out. step: number of the last step that was taken."""
        text = (
            f"out of memory with micro-batches of {before.micro_batch_size} rows: repeating step {step + 1} with "
            f"{after.micro_batch_size}, {after.accumulation_steps} accumulated; the global batch is unchanged"
        )
        self.reporter.say(text, is_warning=True, step=step)
