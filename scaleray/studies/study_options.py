"""Options of `scaleray study`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scaleray.common.options import Numbers, Words, whole_numbers, words_of
from scaleray.errors import ConfigError

if TYPE_CHECKING:
    from scaleray.records.study_record import Mode

MODES: tuple[Mode, ...] = ("strong", "weak")
MOST_REPEATS = 1000


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Measurements of a study and their settings."""

    world_sizes: Numbers = "1,2"
    """Numbers of workers, separated by commas."""
    mode: Words = "strong"
    """strong: the config's global batch divided among the workers. weak: a batch that grows with their number. Or
    both."""
    repeats: int = 5
    """Number of measurements of each size."""
    steps: int = 40
    """Fewest optimizer steps of a measurement, including its warm-up, which does not count."""
    seconds: float = 3.0
    """Shortest duration of a measurement in seconds."""
    to_target: bool = False
    """Train each size to the config's stop.at as well, and report time and samples to it."""
    noise: bool = False
    """Measure the gradient noise scale of each size, as with noise_scale.measure auto, in untimed steps."""
    relaunch: bool = False
    """Launch each size separately instead of as a part of the largest group."""
    oversubscribe: bool = False
    """Measure even if workers must share cores; every value is marked."""
    force: bool = False
    """Repeat known measurements."""
    points_of: Sequence[str] = ()
    """Folder of another study whose points belong to the same curves; refused if its conditions differ."""
    seed: int = 0
    """Seed of the order of measurements."""
    local: bool = False
    """Run in plain gloo processes on this machine, without Ray."""

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1:
            raise ConfigError("--world-sizes", self.sizes, "it must be whole numbers from 1, such as 1,2,4")
        if not self.modes or not {*self.modes} <= {*MODES}:
            wrong = next((mode for mode in self.modes if mode not in MODES), "")
            raise ConfigError("--mode", wrong, "it must be strong, weak, or both separated by a comma")
        if not 1 <= self.repeats <= MOST_REPEATS:
            raise ConfigError("--repeats", self.repeats, f"it must be 1 to {MOST_REPEATS}", "5 is a common choice")
        if self.steps < 4:
            raise ConfigError("--steps", self.steps, "it must be at least 4", "40 leaves 20 after the warm-up")
        if not 0 <= self.seconds < 86_400:
            raise ConfigError("--seconds", self.seconds, "it must be at least 0 and less than a day")

    @property
    def sizes(self) -> list[int]:
        """The numbers of workers, each once, in order."""
        return sorted(set(whole_numbers("--world-sizes", self.world_sizes)))

    @property
    def modes(self) -> list[str]:
        """The measured modes."""
        return words_of(self.mode)
