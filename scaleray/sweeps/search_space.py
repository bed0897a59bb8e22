"""Variables of a sweep and the resulting trials: batch sizes, rules, learning rates, and any other config key.

A candidate is a mapping of dotted keys to values. Candidates that cannot run are listed separately with the reason.
"""

import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scaleray.errors import ConfigError

MOST_COMBINATIONS = 100_000
BATCH_SIZE, RULE, LEARNING_RATE = "batch.global_size", "optimizer.rule", "optimizer.learning_rate"
WARMUP, OPTIMIZER, SEED = "schedule.warmup", "optimizer.name", "seed"

NAMED = (BATCH_SIZE, RULE, LEARNING_RATE, WARMUP, OPTIMIZER, SEED)
"""Keys that have a field of their own in every trial's record."""
MUTATIONS = "mutations"
"""Additional key of a population's trial: the changes of its learning rate."""

Settings = dict[str, Any]
"""Dotted config keys and their values."""
Refuse = Callable[[Settings], str | None]
"""Function that returns the reason why a candidate cannot run, or None."""


@dataclass(frozen=True)
class LogUniform:
    """Any value in a range, uniform on a logarithmic scale. Written `1e-4..1e-2`."""

    low: float
    high: float

    def draw(self, chance: random.Random) -> float:
        """Return a random value, rounded to three digits for readability."""
        value = math.exp(chance.uniform(math.log(self.low), math.log(self.high)))
        return min(self.high, max(self.low, float(f"{value:.3g}")))


@dataclass(frozen=True)
class Space:
    """The space of a sweep's trials.

    choices: values of each key, in the given order. learning_rates: as tuned at the reference batch, before the rule is
    applied. num_seeds: number of runs of each combination.
    """

    choices: Mapping[str, tuple[Any, ...]]
    learning_rates: tuple[float, ...] | LogUniform
    num_seeds: int = 1
    first_seed: int = 0

    @property
    def varied(self) -> tuple[str, ...]:
        """Keys that have more than one value."""
        has_rates = not self.is_finite or len(set(self.learning_rates)) > 1  # type: ignore[arg-type]
        return (*(k for k, v in self.choices.items() if len(v) > 1), *((LEARNING_RATE,) if has_rates else ()))

    @property
    def is_finite(self) -> bool:
        """Whether all combinations can be listed."""
        return not isinstance(self.learning_rates, LogUniform)

    def combinations(self) -> list[Settings]:
        """All combinations, without the seeds and, if learning rates are a range, without learning rates.

        Raises ConfigError if there are too many.
        """
        choices = dict(self.choices)
        if not isinstance(self.learning_rates, LogUniform):
            choices[LEARNING_RATE] = self.learning_rates
        total = math.prod(len(values) for values in choices.values())
        if total > MOST_COMBINATIONS:
            raise ConfigError.problem(
                "The search space",
                f"has {total:,} combinations, but at most {MOST_COMBINATIONS:,} can be checked",
                "vary fewer keys, or give fewer values",
            )
        return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


@dataclass(frozen=True)
class Candidates:
    """Trials to run, in order, and those that cannot run, each with the reason."""

    chosen: list[Settings]
    refused: list[tuple[Settings, str]] = field(default_factory=list)
    num_possible: int | None = None
    """Number of combinations that can run; None if a value has a continuous range."""


def choose(space: Space, *, search: str, num_trials: int | None, refuse: Refuse, seed: int) -> Candidates:
    """Return the candidates of a grid, or of a random draw without repeats, seeds included.

    The order is also random, so that a machine that slows down or a scheduler that learns does not favour any
    candidate. num_trials: number of combinations, each of which runs once per seed. Raises ConfigError.
    """
    chance = random.Random(seed)
    combinations = space.combinations()
    if not space.is_finite:
        return _draw(space, combinations, num_trials, refuse, chance)
    reasons = [(settings, refuse(settings)) for settings in combinations]
    possible = [settings for settings, reason in reasons if reason is None]
    refused = [(settings, reason) for settings, reason in reasons if reason is not None]
    if search == "grid" and num_trials is not None and num_trials < len(possible):
        raise ConfigError(
            "--trials",
            num_trials,
            f"the grid has {len(possible)} combinations",
            "omit it, give fewer values, or use --search random, which draws that many",
        )
    chance.shuffle(possible)
    chosen = possible if num_trials is None else possible[:num_trials]
    return Candidates(_with_seeds(chosen, space), refused, len(possible))


def _draw(
    space: Space, combinations: list[Settings], num_trials: int | None, refuse: Refuse, chance: random.Random
) -> Candidates:
    assert isinstance(space.learning_rates, LogUniform)
    if num_trials is None:
        raise ConfigError(
            "--trials",
            None,
            "a range has infinitely many learning rates",
            "give the number to draw, or the learning rates as a list",
        )
    chosen: list[Settings] = []
    refused: dict[str, tuple[Settings, str]] = {}
    open_ones = list(combinations)
    while open_ones and len(chosen) < num_trials:
        chance.shuffle(open_ones)
        for combination in list(open_ones):  # each once before any is repeated
            if len(chosen) == num_trials:
                break
            settings = {**combination, LEARNING_RATE: space.learning_rates.draw(chance)}
            reason = refuse(settings)
            if reason is None:
                chosen.append(settings)
            else:
                refused[str(combination)] = (settings, reason)
                open_ones.remove(combination)
    return Candidates(_with_seeds(chosen, space), list(refused.values()))


def _with_seeds(chosen: Iterable[Settings], space: Space) -> list[Settings]:
    return [
        {**settings, SEED: settings.get(SEED, space.first_seed) + repeat}
        for settings in chosen
        for repeat in range(space.num_seeds)
    ]


def to_text(settings: Mapping[str, Any]) -> str:
    """Settings of a trial other than the keys that every trial has, as text such as `strategy.name fsdp`.

    Settings that only control measurements are omitted.
    """
    shown = {k: v for k, v in settings.items() if k not in (*NAMED, MUTATIONS) and not k.startswith("noise_scale.")}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def parse_sizes(option: str, text: str) -> tuple[int, ...]:
    """Parse batch sizes. `32..2048`: 32 and every doubling up to 2048; or `32,48,64`. Raises ConfigError."""
    example = "such as 32..2048 for all doublings, or 32,64,256"
    if match := re.fullmatch(r"\s*(\d{1,12})\s*\.\.\s*(\d{1,12})\s*", text):
        low, high = int(match[1]), int(match[2])
        if not 1 <= low <= high:
            raise ConfigError(option, text, "the first number must be at least 1 and at most the second", example)
        return tuple(low * 2**k for k in range((high // low).bit_length()))
    sizes = _parse_list(option, text, int, example)
    if min(sizes) < 1:
        raise ConfigError(option, text, "sizes must be at least 1", example)
    return sizes


def parse_rates(option: str, text: str) -> tuple[float, ...] | LogUniform:
    """Parse learning rates. `1e-4..1e-2`: any value in the range; or `1e-3,2e-3`. Raises ConfigError."""
    example = "such as 1e-4..1e-2 for any value in the range, or 1e-3,2e-3,4e-3"
    low, dots, high = text.partition("..")
    rates = _parse_list(option, f"{low},{high}" if dots else text, float, example)
    if not all(0 < rate < math.inf for rate in rates) or (dots and (len(rates) != 2 or rates[0] >= rates[1])):
        raise ConfigError(option, text, "learning rates must be above 0, and a range must end above its start", example)
    return LogUniform(rates[0], rates[1]) if dots else rates


def parse_names(option: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Parse names separated by commas, each one of `allowed`. Raises ConfigError."""
    names = _parse_list(option, text, str, f"available: {', '.join(allowed)}")
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise ConfigError(option, unknown[0], f"it must be one of {', '.join(allowed)}")
    return names


def _parse_list(option: str, text: str, kind: Callable[[str], Any], example: str) -> tuple[Any, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        values = [kind(word) for word in words]
    except ValueError:
        raise ConfigError(option, text, f"it must be {example}") from None
    if not values:
        raise ConfigError(option, text, f"it must be {example}")
    return tuple(dict.fromkeys(values))
