"""Stream of the batches of a part that may be cut anew between two steps: other shares of the same samples."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from scaleray.data.part import Part
from scaleray.data.stream import RankBatch, StepStream


class PartStream:
    """Iterator over the RankBatches of a part, like the stream that `open_part` opens; opens another one when asked.

    timeout_s: seconds that the reader of the old stream may take to leave the source, which need not stand two readers.
    """

    def __init__(self, open_part: Callable[[Part], StepStream], part: Part, *, timeout_s: float = 300.0) -> None:
        self.part, self._open_part, self._timeout_s = part, open_part, timeout_s
        self._waited_s = 0.0
        self._stream = open_part(part)

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for input so far, over all streams and the changes from one to the next."""
        return self._waited_s + self._stream.waited_s

    def __iter__(self) -> PartStream:
        return self

    def __next__(self) -> RankBatch:
        return next(self._stream)

    def cut(self, step: int, shares: tuple[int, ...] | None) -> None:
        """Give this rank the batches of these shares from `step` on, which must be the next step.

        What was read ahead is thrown away, and the old stream is closed before the new one is opened.
        """
        started = time.perf_counter()
        self._stream.close(wait_s=self._timeout_s)
        self._waited_s += self._stream.waited_s
        self.part = dataclasses.replace(self.part, first_step=step, shares=shares)
        self._stream = self._open_part(self.part)
        self._waited_s += time.perf_counter() - started

    def close(self) -> None:
        """Stop reading ahead. Safe to call twice."""
        self._stream.close()
