"""Report of compilation: logged after the first step, which compiles, and summed up at the end."""

from __future__ import annotations

from typing import Any

from scaleray.common.watchers import Watcher
from scaleray.training.health.reporter import Reporter
from scaleray.training.observer import Observer, TakenStep
from scaleray.training.setup.model_setup import Setup


class CompilationWatch(Observer):
    """Looks at the compilation of a model. Where nothing is to be compiled, it does nothing."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self._is_checked = False

    def begin(self, setup: Setup) -> None:
        """Take note of what is to be compiled."""
        self._compilation = setup.compilation

    def after_step(self, taken: TakenStep) -> None:
        """Say what was not compiled, as nothing else would. Raises ConfigError where `compilation.must_succeed` asks
        for it."""
        if self._compilation is None or self._is_checked:
            return
        self._is_checked = True
        for text in self._compilation.check():
            self.reporter.say(text, is_warning=True, step=taken.number)

    def report(self) -> dict[str, Any]:
        """Compiled parts, for the summary."""
        if self._compilation is None:
            return {}
        return self.reporter.guard(Watcher.NOTES, self._compilation.report, {}, part="compilation")
