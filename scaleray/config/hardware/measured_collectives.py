"""All-reduce times measured on the cluster: output of nccl-tests' all_reduce_perf, or a CSV file.

They replace the formulas for the group on which they were measured, and correct them for other groups
(`communication`).
"""

import bisect
import csv
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaleray.errors import ConfigError

COLUMNS = ("ranks", "nodes", "bytes", "seconds")
WANTED = f"it must contain the output of nccl-tests' all_reduce_perf, or CSV with the columns {', '.join(COLUMNS)}"


@dataclass(frozen=True)
class MeasuredTable:
    """All-reduce times of one group of ranks on one cluster. Message sizes increase; times are in seconds, for the
    whole operation."""

    message_bytes: Sequence[float]
    time_s: Sequence[float]
    num_ranks: int
    num_nodes: int = 1

    def all_reduce_s(self, nbytes: float) -> float:
        """Seconds of an all-reduce, interpolated logarithmically; outside the measured sizes, with the latency of the
        smallest or the bandwidth of the largest message."""
        if nbytes <= self.message_bytes[0]:
            return self.time_s[0]
        if nbytes >= self.message_bytes[-1]:
            return self.time_s[-1] * nbytes / self.message_bytes[-1]
        right = bisect.bisect_left(self.message_bytes, nbytes)
        low, high = self.message_bytes[right - 1], self.message_bytes[right]
        share = math.log(nbytes / low) / math.log(high / low)
        return self.time_s[right - 1] ** (1 - share) * self.time_s[right] ** share


def read_measured_tables(path: Path) -> tuple[MeasuredTable, ...]:
    """Read the tables of all groups in a file. Raises ConfigError if it cannot be read or has neither format."""
    try:
        text = path.read_text()
    except (OSError, ValueError) as exc:
        raise ConfigError("collectives file", str(path), f"it cannot be read: {exc}") from exc
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and [name.strip() for name in lines[0].split(",")] == list(COLUMNS):
        return _of_csv(lines, path)
    return (_of_nccl_tests(lines, path),)


def _of_csv(lines: Iterable[str], path: Path) -> tuple[MeasuredTable, ...]:
    groups: dict[tuple[int, int], dict[float, float]] = {}
    for number, row in enumerate(csv.reader(lines), start=1):
        if number == 1:
            continue
        try:
            ranks, nodes, nbytes, seconds = int(row[0]), int(row[1]), float(row[2]), float(row[3])
        except (ValueError, IndexError):
            raise ConfigError(
                f"collectives file {path}: line {number}", ",".join(row), "it must be four numbers"
            ) from None
        groups.setdefault((ranks, nodes), {})[nbytes] = seconds
    if not groups:
        raise ConfigError("collectives file", str(path), WANTED)
    return tuple(_table(times, *group, path) for group, times in groups.items())


def _of_nccl_tests(lines: Sequence[str], path: Path) -> MeasuredTable:
    """Parse the output of nccl-tests: comments contain ranks and hosts; a data line has bytes, count, type, operation
    and root, then time (us), algorithm and bus bandwidth out of place, and the same in place.
    """
    ranks: dict[int, str] = {}
    times: dict[float, float] = {}
    for line in lines:
        rank = re.match(r"#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device", line)
        if rank:
            ranks[int(rank[1])] = rank[2]
        figures = re.match(r"\s*(\d+)\s+\d+\s+\w+\s+(\w+)\s+-?\d+\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)", line)
        if not figures or int(figures[1]) == 0:
            continue
        nbytes, time_us, algorithm, bus = (float(figures[index]) for index in (1, 3, 4, 5))
        if figures[2] == "none" or (
            len(ranks) > 1 and algorithm > 1 and abs(bus / algorithm - 2 * (len(ranks) - 1) / len(ranks)) > 0.05
        ):
            raise ConfigError.problem(
                f"collectives file {path}", f"has the line {line.strip()} of another operation: run all_reduce_perf"
            )
        times[nbytes] = time_us * 1e-6
    if not times or len(ranks) < 2:
        raise ConfigError("collectives file", str(path), WANTED)
    return _table(times, len(ranks), len(set(ranks.values())), path)


def _table(times: dict[float, float], num_ranks: int, num_nodes: int, path: Path) -> MeasuredTable:
    if num_ranks < 2 or not 1 <= num_nodes <= num_ranks:
        raise ConfigError.problem(
            f"collectives file {path}",
            f"has {num_ranks} ranks on {num_nodes} nodes: it needs at least two ranks, and no more nodes than ranks",
        )
    wrong = [nbytes for nbytes, seconds in times.items() if not (0 < nbytes < math.inf and 0 < seconds < math.inf)]
    if wrong:
        raise ConfigError.problem(
            f"collectives file {path}", f"has a measurement of {wrong[0]} bytes: bytes and seconds must be positive"
        )
    sizes = sorted(times)
    return MeasuredTable(tuple(sizes), tuple(times[size] for size in sizes), num_ranks, num_nodes)
