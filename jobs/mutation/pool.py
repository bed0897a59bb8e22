"""A pytest plugin that makes the pool of gloo processes cheap: forked from a server that has torch, and no more than a test
needs. That saves most of the time of a mutant."""

from __future__ import annotations

import multiprocessing
from typing import Any


def pytest_configure() -> None:
    """Before any test has asked for the pool."""
    import gloo_pool

    attempt, start, largest = gloo_pool.GlooPool.attempt, gloo_pool.GlooPool._start, gloo_pool.LARGEST_WORLD

    def with_few(self: Any, world_size: int, *task: Any) -> Any:
        self._wanted = world_size
        return attempt(self, world_size, *task)

    def start_missing(self: Any) -> None:
        if not self._processes:
            gloo_pool.LARGEST_WORLD = self._wanted
            start(self)
        for rank in range(len(self._processes), self._wanted):
            ours, theirs = ByServer.get_context("").Pipe()
            process = ByServer.get_context("").Process(target=gloo_pool._serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        gloo_pool.LARGEST_WORLD = largest  # which `attempt` allows

    gloo_pool.GlooPool.attempt, gloo_pool.GlooPool._start = with_few, start_missing
    gloo_pool.multiprocessing = ByServer


class ByServer:
    """`multiprocessing` as the pool sees it."""

    @staticmethod
    def get_context(method: str) -> Any:
        """Processes forked from the server, whatever was asked for."""
        return multiprocessing.get_context("forkserver")
