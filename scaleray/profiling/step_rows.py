"""Per-step measurements in constant space: totals of all steps, rows of some, sums over time.

Used by training/profile (each worker stores its own) and run_profile (which reads them).
"""

from __future__ import annotations

import numpy as np

from scaleray.records.profile_record import MOST_BUCKETS

MOST_ROWS = 2000
"""Most rows of single steps that are stored: enough for a median within 2 %, and 96 KB per rank."""


class StepRows:
    """Table with one row per step; older rows are thinned out evenly. Totals and sums cover all steps."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.columns = columns
        self.num_steps = 0
        self.every, self.bucket_width = 1, 1
        self.totals = np.zeros(len(columns))
        self._rows = np.empty((0, len(columns)), dtype=np.float32)
        self._sums = np.zeros((MOST_BUCKETS, len(columns)))

    @property
    def rows(self) -> np.ndarray:
        """Rows of steps 0, `every`, 2 `every`, ... (rows, columns)."""
        return self._rows

    @property
    def series(self) -> np.ndarray:
        """Sums over `bucket_width` steps each (buckets, columns); the last bucket may have fewer steps."""
        return self._sums[: -(-self.num_steps // self.bucket_width)]

    def add(self, values: np.ndarray) -> None:
        """Add the next steps (steps, columns), in order."""
        numbers = np.arange(self.num_steps, self.num_steps + len(values))
        self.num_steps += len(values)
        self.totals += values.sum(axis=0)
        while self.num_steps > self.bucket_width * MOST_BUCKETS:
            half = MOST_BUCKETS // 2
            self._sums[:half] = self._sums[0::2] + self._sums[1::2]
            self._sums[half:] = 0.0
            self.bucket_width *= 2
        np.add.at(self._sums, numbers // self.bucket_width, values)
        self._rows = np.concatenate([self._rows, values[numbers % self.every == 0].astype(np.float32)])
        while len(self._rows) > MOST_ROWS:
            self._rows = self._rows[::2].copy()
            self.every *= 2
