"""Answer of `scaleray plan`: the ranked layouts, the outlook, the ways to a target, and the cost of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scaleray.cli.plan_options import ClusterOptions, MeasuredOptions, ModelOptions, RecipeOptions, TargetOptions
from scaleray.cli.plan_question import question_of
from scaleray.cli.plan_target import Asked, ways_and_samples
from scaleray.errors import StorageError
from scaleray.planner.answers.advise import Advice, advise
from scaleray.planner.answers.outlook import Outlook, outlook
from scaleray.planner.cost.checkpoint_stalls import CheckpointCost, checkpoint_cost, is_asked


@dataclass(frozen=True)
class Answer:
    """One plan. found: how long the training is, and the ways to its target where they were asked for. checkpoints:
    their cost, where that was asked for."""

    advice: Advice
    seen: Outlook
    found: Asked
    checkpoints: CheckpointCost | None

    def write_config(self, config: Path | None, out: Path) -> list[str]:
        """Write the best layout that `scaleray train` can run as a config, onto `config`; lines about what it is."""
        from scaleray.cli.plan_write import write_config

        return list(write_config(self.advice, config, out))

    def write_page(self, path: Path, *, command: str, rows: int = 10) -> None:
        """Write the plan as one HTML page. Raises StorageError."""
        from scaleray.reports.records.plan import plan_page

        page = plan_page(
            self.advice, self.seen, command=command, rows=rows, kept=self.checkpoints, ways=self.found.ways
        )
        try:
            path.write_text(page)
        except OSError as exc:
            raise StorageError(
                "--html", str(path), f"it cannot be written: {exc.strerror}", "choose another file"
            ) from exc


def answered(
    model: ModelOptions,
    cluster: ClusterOptions,
    recipe: RecipeOptions,
    measured: MeasuredOptions,
    target: TargetOptions,
    *,
    config: Path | None,
    overrides: Sequence[str],
) -> Answer:
    """The answer to what the options ask. Raises ConfigError or UsageError where something is missing or impossible."""
    question = question_of(model, cluster, recipe, measured, rank_by=target.rank, config=config, overrides=overrides)
    question, found = ways_and_samples(question, target, measured.from_run)
    advice = advise(question)
    waits = target.waits_for_checkpoints
    is_wanted = is_asked(question.cluster, target.interval_s) or waits
    cost = checkpoint_cost(
        question.model, advice.best.layout, question.cluster, interval_s=target.interval_s, is_asynchronous=not waits
    )
    return Answer(advice, outlook(advice), found, cost if is_wanted else None)
