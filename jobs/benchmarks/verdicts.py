"""The verdict judged by planted faults: is the class, the rank and the layers right, and what removing the fault gives?

    chrt -f 20 python jobs/benchmarks/verdicts.py [--seeds 10] [--sizes 0.25,0.1] [--minutes 13]
    chrt -f 20 python jobs/benchmarks/verdicts.py --tc --kept FILE    # slow links of the kernel, as root
    python jobs/benchmarks/verdicts.py --report --kept FILE FILE ...

Each training runs scaleray's own loop on two gloo processes that stay up; its compute is a timed sleep
(`scaleray.emulation`), so that two ranks fit two cores, and everything else is real. A fault is planted in one training
at a time, and the same training without it says what removing it really gives. What is emulated is said beside each
fault. Ranks mostly sleep; `chrt` keeps other work on the machine from waking them late. Finished trainings are kept in a
file; the command goes on where it was, and writes the report when all are there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import harness
from planted.faults import STRATEGIES
from planted.report import compact, describe
from planted.runs import cases, enter_namespace, key_of, real_link_cases, run_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--sizes", default="0.25,0.1", help="planted delays, as shares of a healthy step")
    parser.add_argument("--tc", action="store_true", help="a real slow link instead, in a network namespace; as root")
    parser.add_argument("--report", action="store_true", help="train nothing: the report of what is kept")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--only", default="", help="trainings whose name contains this")
    parser.add_argument("--minutes", type=float, default=13.0, help="stop after so long, and go on with the next call")
    parser.add_argument("--kept", type=Path, nargs="+", default=[Path(tempfile.gettempdir()) / "verdicts.jsonl"])
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    arguments = parser.parse_args()
    if arguments.tc:
        enter_namespace()
    sizes = [float(size) for size in arguments.sizes.split(",")]
    conditions = harness.conditions(["torch", "numpy"])
    make = real_link_cases if arguments.tc else cases
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    todo = [s for s in make(arguments.strategies.split(","), sizes, seeds) if arguments.only in key_of(s)]
    is_complete = arguments.report or run_all(todo, arguments.kept[0], arguments.minutes)
    results = [json.loads(line) for kept in arguments.kept for line in kept.read_text().splitlines()]
    text, rows = describe(results)
    if not is_complete:
        print(text)
        sys.exit("not all trainings are done: run the command again")
    record = {"conditions": conditions, "arguments": harness.arguments_of(arguments), "trainings": compact(rows)}
    harness.write_report(
        "verdicts", title="Verdicts on planted faults", text=text, record=record, folder=arguments.results
    )


if __name__ == "__main__":
    main()
