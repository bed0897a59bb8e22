"""Answer of `scaleray plan`: ranked layouts, the outlook, the ways to a target, and the cost of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scaleray.common.installed import names_what_is_missing
from scaleray.common.options import takes
from scaleray.errors import StorageError
from scaleray.planner.answers.advise import Advice, advise
from scaleray.planner.answers.outlook import Outlook, outlook
from scaleray.planner.ask.asked_plan import question_of
from scaleray.planner.ask.plan_options import LayoutOptions, PlanOptions
from scaleray.planner.ask.plan_record import registered
from scaleray.planner.ask.target import Asked, ways_and_samples
from scaleray.planner.cost.checkpoint_stalls import CheckpointCost, checkpoint_cost, is_asked


@dataclass(frozen=True)
class Answer:
    """Result of one plan. found: length of the training and, if requested, the ways to its target. checkpoints: their
    cost, if requested."""

    advice: Advice
    seen: Outlook
    found: Asked
    checkpoints: CheckpointCost | None

    def write_config(self, config: Path | None, out: Path) -> list[str]:
        """Write the best layout that `scaleray train` can run as a config, based on `config`; return lines about it."""
        from scaleray.planner.ask.written_plan import write_config

        return list(write_config(self.advice, config, out))

    def write_page(self, path: Path, *, command: str, rows: int = 10) -> None:
        """Write the plan as one HTML page. Raises StorageError."""
        from scaleray.planner.report.plan_page import plan_page

        page = plan_page(
            self.advice, self.seen, command=command, rows=rows, kept=self.checkpoints, ways=self.found.ways
        )
        try:
            path.write_text(page)
        except OSError as exc:
            raise StorageError(
                "--html", str(path), f"it cannot be written: {exc.strerror}", "choose another file"
            ) from exc


def answered(options: PlanOptions, *, config: Path | None, overrides: Sequence[str]) -> Answer:
    """Compute the answer for a plan's options. Raises ConfigError or UsageError for missing or impossible options."""
    question = question_of(options, rank_by=options.rank_by, config=config, overrides=overrides)
    question, found = ways_and_samples(question, options)
    advice = advise(question)
    waits = options.waits_for_checkpoints
    is_wanted = is_asked(question.cluster, options.interval_s) or waits
    cost = checkpoint_cost(
        question.model, advice.best.layout, question.cluster, interval_s=options.interval_s, is_asynchronous=not waits
    )
    return Answer(advice, outlook(advice), found, cost if is_wanted else None)


@names_what_is_missing
@takes(PlanOptions)
def plan(*, options: PlanOptions, config: str | Path | None = None, overrides: Sequence[str] = ()) -> Advice:
    """Rank the layouts of a model on a cluster by arithmetic alone; `.best` of the result is the recommended one.

    The model is given by `model`, by `profile`, or by config: a YAML file whose workload is counted, with `overrides`
    as on the command line. The cluster is given by `cluster`, or by `here`. With rank_by="time-to-target" the advice is
    for the batch size of the best way. Needs neither torch nor Ray. Raises ConfigError and UsageError.
    """
    file, command = None if config is None else Path(config), "scaleray.plan(...)"
    answer = answered(options, config=file, overrides=overrides)
    registered(answer, record=options.record, command=command)
    if options.write is not None:
        answer.write_config(file, Path(options.write))
    if options.html is not None:
        answer.write_page(Path(options.html), command=command)
    return answer.advice


@names_what_is_missing
@takes(LayoutOptions)
def explain_plan(what: str = "constants", *, options: LayoutOptions, rows: int = 20) -> list[str]:
    """Return the planner's constants with their sources, or the layouts that do not fit in memory, as lines.

    what: constants; intervals; a GPU, link or network by name; or, with a model, a cluster and a global batch, layouts.
    rows: layouts to list. Raises ConfigError and UsageError.
    """
    from scaleray.planner.answers.explain import explain_constants, explain_hardware, explain_intervals, explain_layouts

    if what == "constants":
        return explain_constants()
    if what == "intervals":
        return explain_intervals()
    if what == "layouts":
        return explain_layouts(question_of(options), rows=rows)
    return explain_hardware(what)
