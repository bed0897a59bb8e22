"""A command of scaleray in a process of its own that need not import torch and MLflow first, which takes longer than what
most of these commands do: it is forked from the process from which the gloo pool's are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from gloo_pool import PRELOADED


class ForkedCommand:
    """What `subprocess.Popen` is for `python -m scaleray`: with poll, send_signal, communicate and returncode."""

    def __init__(self, words: Sequence[str], *, cwd: Path, environment: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="scaleray-command-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        surroundings = dict(os.environ if environment is None else environment)
        args = (list(words), str(cwd), surroundings, self._folder.name)
        self._process = context.Process(target=_run, args=args, daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote to stdout and stderr, once it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise TimeoutError(f"it did not end in {timeout} s")
        output, errors = (Path(self._folder.name, name).read_text() for name in ("stdout", "stderr"))
        return output, errors


def _run(words: list[str], cwd: str, environment: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        stream.flush()
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), 1 if name == "stdout" else 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the forking process ignores it
    from scaleray.cli import main

    sys.argv = ["scaleray", *words]
    exit_now = os._exit
    try:
        main()
    finally:
        os._exit = exit_now  # the command makes an early end a failure, and this is how a forked process ends
