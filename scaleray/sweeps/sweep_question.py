"""Question of a sweep: space of trials, search, scheduler and metric."""

from dataclasses import dataclass
from typing import Any, get_args

from scaleray.common.options import takes
from scaleray.common.parsing import load_yaml
from scaleray.config import Duration, RunConfig
from scaleray.config.optimizer_schedule import OptimizerSettings, missing_rate
from scaleray.config.recipe.lr_rules import RULES
from scaleray.errors import ConfigError
from scaleray.sweeps.search_space import (
    BATCH_SIZE,
    LEARNING_RATE,
    OPTIMIZER,
    RULE,
    SEED,
    WARMUP,
    Space,
    parse_names,
    parse_rates,
    parse_sizes,
)
from scaleray.sweeps.sweep_options import Scheduler, Search, SweepOptions

OPTIONS = {
    BATCH_SIZE: "--batch-sizes",
    RULE: "--rules",
    OPTIMIZER: "--optimizers",
    WARMUP: "--warmups",
    LEARNING_RATE: "--learning-rates",
}
"""Keys that have their own command-line option, with the option's name."""


@dataclass(frozen=True, kw_only=True)
class SweepQuestion:
    """The question that a sweep answers. metric: metric and direction, such as `val/loss min`; None for the target's
    metric, or else the first split's loss.

    batch_sizes_are_listed: batch sizes were listed one by one, so a size that does not fit is a mistake. num_trials:
    number of combinations, each of which runs with every seed.
    """

    space: Space
    search: Search = "random"
    scheduler: Scheduler = "fifo"
    num_trials: int | None = None
    workers_per_trial: int = 1
    metric: str | None = None
    batch_sizes_are_listed: bool = False
    guided_share: float | None = None
    """Largest share of the grid's samples for a guided sweep, which runs only promising trials; None: not guided."""


@takes(SweepOptions)
def question_of(config: RunConfig, *, options: SweepOptions) -> SweepQuestion:
    """Return the question given by the command's options. Keys that are not varied keep the config's values.

    Raises ConfigError.
    """
    asked, names = options, get_args(OptimizerSettings.model_fields["name"].annotation)
    choices: dict[str, tuple[Any, ...]] = {
        BATCH_SIZE: (config.batch.global_size,),
        RULE: (config.optimizer.rule,),
        OPTIMIZER: (config.optimizer.name,),
        WARMUP: (str(config.schedule.warmup),),
    }
    if asked.batch_sizes:
        choices[BATCH_SIZE] = parse_sizes("--batch-sizes", asked.batch_sizes)
    if asked.rules:
        choices[RULE] = parse_names("--rules", asked.rules, tuple(RULES))
    if asked.optimizers:
        choices[OPTIMIZER] = parse_names("--optimizers", asked.optimizers, names)
    if asked.warmups:
        choices[WARMUP] = _durations(asked.warmups)
    choices |= dict(map(_varied, asked.vary))
    rate = config.optimizer.learning_rate
    if not asked.learning_rates and rate is None:
        raise missing_rate("the sweep starts from it")
    rates = parse_rates("--learning-rates", asked.learning_rates) if asked.learning_rates else (rate or 0.0,)
    if asked.guided:
        _check_guided(asked.guided_share, asked.search)
    search: Search = "grid" if asked.guided else asked.search
    space = Space(choices, rates, num_seeds=asked.seeds, first_seed=config.seed)
    _check_search(space, search, asked.scheduler, asked.trials)
    if asked.workers_per_trial is None and config.scale.is_elastic:
        raise ConfigError(
            "scale.workers",
            str(config.scale.workers),
            "trials have a fixed number of workers",
            "for example --workers-per-trial 2",
        )
    return SweepQuestion(
        space=space,
        search=search,
        scheduler=asked.scheduler,
        num_trials=asked.trials,
        metric=asked.metric,
        workers_per_trial=asked.workers_per_trial or config.scale.max_workers,
        batch_sizes_are_listed=asked.batch_sizes is not None and ".." not in asked.batch_sizes,
        guided_share=asked.guided_share if asked.guided else None,
    )


def _check_guided(share: float, search: Search) -> None:
    if not 0 < share <= 1:
        raise ConfigError("--guided-share", share, "it must be a share of the grid's samples, above 0 and at most 1")
    if search == "optuna":
        raise ConfigError("--search", search, "a guided sweep chooses among the trials of a grid", "omit it")


def _check_search(space: Space, search: Search, scheduler: Scheduler, trials: int | None) -> None:
    """Raise ConfigError if the search or scheduler does not suit this space or number of trials."""
    if search == "grid" and not space.is_finite:
        raise ConfigError(
            "--search",
            "grid",
            "a range of learning rates has no grid",
            "give learning rates as a list, or use --search random",
        )
    if search == "optuna" and trials is None:
        raise ConfigError("--trials", None, "Optuna can suggest any number of trials", "for example --trials 24")
    if scheduler == "pbt" and space.num_seeds > 1:
        raise ConfigError("--seeds", space.num_seeds, "trials of pbt copy weights from each other", "omit it with pbt")


def _durations(text: str) -> tuple[str, ...]:
    found = []
    for word in text.split(","):
        try:
            found.append(str(Duration.parse(word)))
        except ValueError as exc:
            raise ConfigError("--warmups", word.strip(), str(exc)) from None
    return tuple(dict.fromkeys(found))


def _varied(text: str) -> tuple[str, tuple[Any, ...]]:
    """Split `key=v1,v2` into a key and its values, which are parsed as YAML: `[0.9, 0.99]` is one value."""
    key, equals, given = text.partition("=")
    key = key.strip().removeprefix("--").replace("-", "_")
    example = "such as --vary optimizer.weight_decay=0,0.01"
    if not equals or not key or not given.strip():
        raise ConfigError("--vary", text, "it must be a key and its values", example)
    if key in OPTIONS:
        raise ConfigError("--vary", text, f"{key} has its own option", f"use {OPTIONS[key]}")
    if key in (SEED, "scale.workers"):
        raise ConfigError("--vary", text, f"{key} has its own option", "use --seeds or --workers-per-trial")
    try:
        values = load_yaml(f"[{given}]")
    except ValueError:
        raise ConfigError("--vary", text, "the values must be a list, separated by commas", example) from None
    unique = [value for number, value in enumerate(values) if value not in values[:number]]
    return key, tuple(_number(value) for value in unique)


def _number(value: Any) -> Any:
    """The value as a number if it is one, such as `1e-4`, which YAML reads as text."""
    try:
        return float(value) if isinstance(value, str) and any(c.isdigit() for c in value[:2]) else value
    except ValueError:
        return value
