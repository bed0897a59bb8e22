"""What it costs that torch's Flight Recorder remembers every collective, and what a dump of it takes.

    python jobs/benchmarks/flight_recorder.py [--pairs 7] [--calls 4000] [--depth 30]

Pairs of processes, with the recorder and without it, take turns; each calls all_reduce on a gloo group of one, from some
frames deep, as the recorder keeps Python's stack with every call. CPU seconds, so that other processes disturb little.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from typing import Any


def calls(size: int, num_calls: int, depth: int, answer: Any) -> None:
    """CPU microseconds of a call with so many calls remembered, and milliseconds of the two kinds of dumps."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(size)
    import torch
    import torch.distributed as dist

    from scaleray.training.health import flight_recorder

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    values = torch.ones(4)

    def deep(left: int) -> None:
        if left:
            deep(left - 1)
        else:
            dist.all_reduce(values)

    for _ in range(100):
        deep(depth)
    began = time.process_time()
    for _ in range(num_calls):
        deep(depth)
    per_call = (time.process_time() - began) / num_calls * 1e6
    dumps = []
    for read in (flight_recorder.entries_without_lines, flight_recorder.entries_with_frames):
        began = time.perf_counter()
        entries = read()
        flight_recorder.user_lines(entries or ())
        dumps.append((time.perf_counter() - began) * 1e3)
    answer.send((per_call, dumps))


def main() -> None:
    """Print the medians."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--pairs", type=int, default=7)
    options.add_argument("--calls", type=int, default=4000)
    options.add_argument("--depth", type=int, default=30)
    given = options.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "scaleray.training.health.flight_recorder"])
    found: dict[int, list[Any]] = {0: [], 2000: []}
    for _ in range(given.pairs):
        for size, results in found.items():
            ours, theirs = context.Pipe()
            process = context.Process(target=calls, args=(size, given.calls, given.depth, theirs))
            process.start()
            results.append(ours.recv())
            process.join()
    extra = [on[0] - off[0] for off, on in zip(found[0], found[2000], strict=True)]
    print(f"a call without it: {statistics.median(off[0] for off in found[0]):.1f} us of CPU time")
    print(
        f"more with it:      {statistics.median(extra):.1f} us (pairs: {', '.join(f'{e:.1f}' for e in sorted(extra))})"
    )
    for kind, part in (("without lines", 0), ("with lines", 1)):
        print(f"a dump of 2000 calls {kind}: {statistics.median(on[1][part] for on in found[2000]):.0f} ms")


if __name__ == "__main__":
    main()
