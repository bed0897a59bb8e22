"""Recipe: all values derived from a config and the size of its data, and their derivations."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from scaleray.config import RunConfig
from scaleray.config.parallel import Degrees
from scaleray.errors import ConfigError


@dataclass(frozen=True)
class DataSize:
    """Size of the training split. tokens_per_sample: None unless samples are sequences of one length. total_tokens,
    longest: tokens of all samples and of the longest one, if samples differ in length."""

    num_samples: int
    tokens_per_sample: int | None = None
    total_tokens: int | None = None
    longest: int | None = None

    def packed_steps(self, config: RunConfig) -> int | None:
        """Steps of an epoch whose batches are counted in tokens of samples of unequal length; otherwise None."""
        if config.batch.unit != "tokens" or self.tokens_per_sample is not None or self.total_tokens is None:
            return None
        return -(-self.total_tokens // config.batch.global_size)

    def tokens_a_sample(self, key: str) -> float:
        """Tokens per sample, on average if lengths differ. Raises ConfigError with the name of `key`."""
        if self.tokens_per_sample is None and self.total_tokens is not None:
            return self.total_tokens / self.num_samples
        return self.tokens_of(key)

    def tokens_of(self, key: str) -> int:
        """Tokens per sample. Raises ConfigError with the name of `key` if samples have no fixed number."""
        if self.tokens_per_sample is None:
            raise ConfigError(
                key,
                "tokens",
                "this data has no fixed number of tokens per sample, and no lengths",
                "count in samples, or use rows of unequal length, a Dataset with `lengths`, or ParquetSource(lengths=)",
            )
        return self.tokens_per_sample

    def largest_batch(self, config: RunConfig) -> int:
        """Largest global batch that the data can fill, in the unit of `batch.global_size`."""
        if self.packed_steps(config) is not None:
            return self.total_tokens or 0
        samples = self.num_samples // config.scale.max_workers * config.scale.max_workers
        return samples * (self.tokens_per_sample or 1) if config.batch.unit == "tokens" else samples


@dataclass(frozen=True)
class Recipe:
    """Derived values. Batch sizes are in samples; steps are optimizer steps."""

    global_batch_size: int
    per_worker_batch_size: int
    micro_batch_size: int
    evaluation_micro_batch_size: int
    accumulation_steps: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    schedule_steps: int
    evaluate_every_steps: int | None
    checkpoint_every_steps: int | None
    keep_checkpoint_every_steps: int | None
    memory_every_steps: int | None
    learning_rate: float | None
    """Peak learning rate; None if the workload's own optimizer sets it, as only its workers know."""
    betas: tuple[float, float]
    epsilon: float
    strategy: str
    degrees: Degrees = dataclasses.field(default_factory=Degrees)
    worker_shares: tuple[int, ...] | None = None
    """Samples of a full global batch for each worker; None: equal shares, at least initially."""
    measure_shares_every_steps: int | None = None
    """Steps between two measurements of the workers' speeds, after which shares may change; None: shares are fixed."""
    parameter_dtype: str | None = None
    """dtype in which sharded parameters are gathered and used; None: the parameters' own, or nothing is sharded."""
    explanations: dict[str, str] = dataclasses.field(default_factory=dict)
    """Derivation of each value, by name."""

    def decides_after(self, step: int) -> bool:
        """Whether an evaluation, a checkpoint or the end follows this step, counted from 1."""
        every = (self.evaluate_every_steps, self.checkpoint_every_steps, self.memory_every_steps)
        return step == self.total_steps or any(n and step % n == 0 for n in every)

    def values(self) -> dict[str, Any]:
        """Derived values without their explanations."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "explanations"}


def with_micro_size(recipe: Recipe, size: int, *, why: str) -> Recipe:
    """Return the recipe with more and smaller micro-batches in the same global batch. Evaluations use the new size if
    they used the old one."""
    follows = recipe.evaluation_micro_batch_size == recipe.micro_batch_size
    return dataclasses.replace(
        recipe,
        micro_batch_size=size,
        accumulation_steps=math.ceil(recipe.per_worker_batch_size / size),
        evaluation_micro_batch_size=size if follows else recipe.evaluation_micro_batch_size,
        explanations={
            **recipe.explanations,
            "micro_batch_size": why,
            "accumulation_steps": f"{recipe.per_worker_batch_size} per worker / {size}",
        },
    )


def largest_divisor(of: int, *, at_most: int) -> int | None:
    """Largest divisor of `of` that is at most `at_most`; None if there is none."""
    return next((d for d in range(min(of, at_most), 0, -1) if of % d == 0), None)


def nearest_multiples(value: int, of: int) -> list[int]:
    """Multiples of `of` next to `value`, at least `of`: suggestions for a `value` that is not a multiple."""
    below = value // of * of
    return sorted({max(of, below), below + of})
