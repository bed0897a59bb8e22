"""How long to wait before a server that did not answer is asked again."""

from __future__ import annotations

FIRST_S, MOST_S = 2.0, 30.0


class Backoff:
    """Seconds to wait: FIRST_S after the first failure, twice as long after each further one, at most MOST_S."""

    def __init__(self) -> None:
        self._wait_s = FIRST_S

    def failed(self) -> float:
        """Seconds to wait after this failure."""
        wait_s, self._wait_s = self._wait_s, min(MOST_S, 2 * self._wait_s)
        return wait_s

    def reset(self) -> None:
        """Forget the failures: it has answered."""
        self._wait_s = FIRST_S
