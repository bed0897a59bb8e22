"""Phases that may take longer than many steps, and the time at which a run was last in one: no step ends meanwhile, and
nothing hangs.
"""

from __future__ import annotations

from collections.abc import Sequence

from scaleray import live_metrics as live
from scaleray.monitoring.live.series import Series, run_labels, series_of
from scaleray.records.phases import Phase
from scaleray.records.run import Heartbeat

LONG_PHASES = (Phase.EVALUATION, Phase.CHECKPOINT, Phase.COMPILING, Phase.END)


class LongPhases:
    """Looks at the first worker's signs of life. longest_s: how long a phase may last before it counts as a hang."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s
        self._phase, self._seen_at = "", 0.0

    def look(self, beats: Sequence[Heartbeat], now: float) -> None:
        """Take note of what the first worker does. now: wall clock."""
        first = beats[0] if beats else None
        if first is not None and first.phase in LONG_PHASES and first.since_s + first.silent_s < self.longest_s:
            self._phase, self._seen_at = str(first.phase), now - first.silent_s

    def series(self, *, run_name: str, run_id: str) -> list[Series]:
        """When such a phase was last seen; nothing before the first one."""
        seen_at = self._seen_at if self._phase else None
        return series_of(live.LONG_PHASE_TIMESTAMP_S, run_labels(run_name, run_id), seen_at, phase=self._phase)
