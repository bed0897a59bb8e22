"""Run external programs that reach a cluster, such as kubectl and ssh, with a time limit, and return their output."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from scaleray.errors import ClusterError

LIMIT_S = 60.0
OF_A_LOG = re.compile(r"[EFIW]\d{4} \d\d:\d\d:\d\d")
"""Prefix of lines that kubectl's libraries write in addition to kubectl's own output."""


@dataclass(frozen=True)
class ProgramOutput:
    """Output of a program, and its exit code."""

    code: int
    raw: bytes = b""
    err: str = ""

    @property
    def out(self) -> str:
        """The output as text."""
        return self.raw.decode(errors="replace")

    @property
    def problem(self) -> str:
        """The error in one line."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        said = [line for line in lines if not OF_A_LOG.match(line)]
        return " ".join(said or lines)[:600] or f"it ended with {self.code} and printed nothing"


def is_there(program: str) -> bool:
    """Whether a program is on the path."""
    return shutil.which(program) is not None


def run(words: Sequence[str], *, given: bytes = b"", limit_s: float = LIMIT_S) -> ProgramOutput:
    """Run a program to its end. given: its input. Raises ClusterError if the program is missing; the exit code is 124
    after a timeout."""
    try:
        done = subprocess.run(list(words), input=given, capture_output=True, timeout=limit_s, check=False)
    except FileNotFoundError as exc:
        raise ClusterError.problem(
            words[0],
            "is not installed here, but this cluster can be reached only with it",
            "install it, or load its module",
        ) from exc
    except subprocess.TimeoutExpired:
        return ProgramOutput(124, err=f"{words[0]} did not answer within {limit_s:g} s")
    return ProgramOutput(done.returncode, done.stdout, done.stderr.decode(errors="replace"))
