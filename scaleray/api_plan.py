"""`scaleray plan` as a function: `scaleray.plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scaleray.installed import names_what_is_missing

if TYPE_CHECKING:
    from scaleray.planner.answers.advise import Advice


@names_what_is_missing
def plan(
    model: str | None = None,
    cluster: str | None = None,
    *,
    config: str | Path | None = None,
    overrides: Sequence[str] = (),
    profile: str | Path | None = None,
    here: bool = False,
    address: str | None = None,
    network: str | None = None,
    hardware: str | Path | None = None,
    collectives: str | Path | None = None,
    global_batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    strategies: Sequence[str] = ("ddp", "zero1", "fsdp", "hsdp", "tp", "pp", "ep"),
    optimizer: Literal["adam", "momentum", "sgd"] | None = None,
    compiled: bool = False,
    step_time: float | None = None,
    micro_batch: int | None = None,
    from_run: str | Path | None = None,
    learn: str | Path | None = None,
    input_rate: float | None = None,
    samples: float | None = None,
    target_steps: float | None = None,
    noise_scale: float | None = None,
    rank_by: str = "throughput",
    checkpoint_minutes: float | None = None,
    waits_for_checkpoints: bool = False,
    write: str | Path | None = None,
    html: str | Path | None = None,
    record: bool = False,
) -> Advice:
    """Rank the layouts of a model on a cluster, by arithmetic alone; `.best` of the advice is the recommended one.

    model: a name such as llama-3-8b, or a size such as gpt-13b; or config: a YAML file whose workload is planned, with
    `overrides` as on the command line; or profile: a workload's counted costs. cluster: as in h100:8x16, or a YAML
    file; or here: this machine, or the Ray cluster at `address`. The other arguments are the options of `scaleray plan`
    of the same name. rank_by: throughput, cost, time, memory, or time-to-target, whose advice is for the batch size of
    the best way. write: a file for the best layout as a config. html: a file for the page. Needs neither torch nor Ray.
    """
    from scaleray.cli.plan_answer import answered
    from scaleray.cli.plan_options import ClusterOptions, MeasuredOptions, ModelOptions, RecipeOptions, TargetOptions
    from scaleray.cli.plan_registered import registered

    answer = answered(
        ModelOptions(model=model, profile=_path(profile)),
        ClusterOptions(
            cluster=cluster,
            here=here,
            address=address,
            network=network,
            hardware=_path(hardware),
            collectives=_path(collectives),
        ),
        RecipeOptions(
            global_batch=global_batch,
            sequence=sequence,
            precision=precision,
            strategies=",".join(strategies),
            optimizer=optimizer,
            compiled=compiled,
        ),
        MeasuredOptions(
            step_time=step_time,
            micro_batch=micro_batch,
            from_run=_path(from_run),
            learn=None if learn is None else str(learn),
            input_rate=input_rate,
        ),
        TargetOptions(
            samples=samples,
            target_steps=target_steps,
            noise_scale=noise_scale,
            rank=rank_by,
            checkpoint_minutes=checkpoint_minutes,
            waits_for_checkpoints=waits_for_checkpoints,
        ),
        config=_path(config),
        overrides=overrides,
    )
    registered(answer, config=_path(config), overrides=overrides, record=record, command="scaleray.plan(...)")
    if write is not None:
        answer.write_config(_path(config), Path(write))
    if html is not None:
        answer.write_page(Path(html), command="scaleray.plan(...)")
    return answer.advice


@names_what_is_missing
def explain_plan(
    what: str = "constants",
    *,
    model: str | None = None,
    cluster: str | None = None,
    global_batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    strategies: Sequence[str] = ("ddp", "zero1", "fsdp", "hsdp", "tp", "pp", "ep"),
    rows: int = 20,
) -> list[str]:
    """Return the planner's figures with their sources, or the layouts that do not fit in memory, as lines: `scaleray
    plan explain`.

    what: constants; intervals; a GPU, link or network by name; or, with a model, a cluster and a global batch, layouts.
    rows: layouts to list.
    """
    from scaleray.cli.plan_explained import explained
    from scaleray.cli.plan_options import ClusterOptions, ModelOptions, RecipeOptions

    return explained(
        what,
        model=ModelOptions(model=model),
        cluster=ClusterOptions(cluster=cluster),
        recipe=RecipeOptions(
            global_batch=global_batch, sequence=sequence, precision=precision, strategies=",".join(strategies)
        ),
        rows=rows,
    )


def _path(given: Any) -> Path | None:
    return None if given is None else Path(given)
