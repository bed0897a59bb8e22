"""Faults on purpose, on a real cluster of several nodes on this machine: every run must end as if nothing had happened.

python jobs/faults.py --faults 40 --seed 0 [--kinds "worker killed,node drained"] [--json FILE]

python jobs/faults.py --spares --faults 500 --seed 0 [--only 17,60] [--kinds "killed,link cut"] [--json FILE]

With --spares, faults strike single steps of gloo processes with spares instead; each is drawn from the seed and its number
alone, so that --only repeats it. Cut links need root, for network namespaces.

Otherwise each fault strikes a run at a random step. Afterwards the run has finished, its weights and every step's loss are those of
the undisturbed run bit for bit, MLflow has every point once, every sample of every epoch was used once, and nothing of the
run is left on the cluster. Exit code 1 when any of that does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scaleray.common.guarded import GUARD_VARIABLE, guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite and print its table; 0 when everything held."""
    from fault_suite.injectors import KINDS
    from fault_suite.run import FULL, QUICK
    from fault_suite.step_faults import KINDS as STEP_KINDS
    from fault_suite.suite import run_suite

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40, help="how many faults must strike")
    parser.add_argument("--seed", type=int, default=0, help="decides kinds, steps and victims")
    parser.add_argument("--kinds", help=f"comma between them: {', '.join(KINDS)}; --spares: {', '.join(STEP_KINDS)}")
    parser.add_argument("--spares", action="store_true", help="faults within steps, of processes with spares")
    parser.add_argument("--only", default="", help="with --spares: numbers of the faults to repeat, each alone")
    parser.add_argument("--minutes", type=float, default=1e9, help="with --spares: begin no training after so many")
    parser.add_argument("--quick", action="store_true", help="shorter runs, and hangs are given up sooner")
    parser.add_argument("--json", type=Path, help="write every fault and its outcome to this file")
    options = parser.parse_args(arguments)
    all_kinds = STEP_KINDS if options.spares else tuple(KINDS)
    kinds = [kind.strip() for kind in options.kinds.split(",")] if options.kinds else list(all_kinds)
    if unknown := [kind for kind in kinds if kind not in all_kinds]:
        parser.error(f"unknown kinds {unknown}; there are: {', '.join(all_kinds)}")
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {text}", flush=True)

    if options.spares:
        return _within_steps(options, kinds, say)
    folder = Path(tempfile.mkdtemp(prefix="scaleray-faults-"))
    report = run_suite(
        options.faults, seed=options.seed, kinds=kinds, folder=folder, say=say, size=QUICK if options.quick else FULL
    )
    if options.json:
        options.json.write_text(json.dumps(report.to_dict(), indent=1))
    print_table(report, kinds)
    if report.is_good:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"the runs are kept in {folder}")
    return 0 if report.is_good else 1


def _within_steps(options: argparse.Namespace, kinds: list[str], say: Callable[[str], None]) -> int:
    from fault_suite.step_faults import run_step_faults
    from rich.console import Console
    from rich.table import Table

    only = [int(number) for number in options.only.split(",") if number]
    report = run_step_faults(
        options.faults, seed=options.seed, kinds=kinds, only=only, minutes=options.minutes, say=say
    )
    if options.json:
        options.json.write_text(json.dumps(report.to_dict(), indent=1))
    table = Table(title="faults within steps")
    for column in ("fault", "struck", "equal to the bit", "stand-still p50 (s)", "p95", "longest"):
        table.add_column(column, justify="right" if table.columns else "left")
    for row in report.rows():
        table.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(table)
    print(f"{report.wall_s:.0f} s, {report.busy_s:.0f} CPU s of the machine, load {os.getloadavg()[0]:.1f}")
    return 0 if report.is_good else 1


def print_table(report, kinds: Sequence[str]) -> None:  # type: ignore[no-untyped-def]
    """One line a kind, and the verdict."""
    from fault_suite.suite import median
    from rich.console import Console
    from rich.table import Table

    table = Table(title="faults on purpose")
    for number, column in enumerate(
        (
            "fault",
            "injected",
            "recovered",
            "steps repeated (median)",
            "time to recover (median s)",
            "weights equal",
            "records equal",
            "samples exactly once",
        )
    ):
        table.add_column(column, justify="right" if number else "left")
    for kind in kinds:
        faults = [fault for fault in report.faults if fault.kind == kind and fault.is_injected]
        if not faults:
            continue
        repeated = median([f.steps_repeated for f in faults if f.steps_repeated is not None])
        recovery = median([f.recovery_s for f in faults if f.recovery_s is not None])
        table.add_row(
            kind,
            str(len(faults)),
            str(sum(f.has_recovered for f in faults)),
            f"{repeated:g}" if repeated is not None else "-",
            f"{recovery:.1f}" if recovery is not None else "-",
            *(
                str(sum(bool(getattr(f, name)) for f in faults))
                for name in ("weights_equal", "records_equal", "samples_once")
            ),
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(table)
    struck = [fault for fault in report.faults if fault.is_injected]
    good = sum(fault.is_good for fault in struck)
    verdict = "every run ended as if undisturbed" if report.is_good else f"{len(report.problems)} problems"
    print(
        f"{good} of {len(struck)} faults without consequence, in {len({f.run for f in struck})} runs and {report.wall_s:.0f} s: {verdict}"
    )


if __name__ == "__main__":
    # a cluster of several nodes: none of its processes may be left, however this one ends
    is_guarded = os.environ.get(GUARD_VARIABLE) == str(os.getppid())
    sys.exit(main() if is_guarded else subprocess.call(guarded([sys.executable, *sys.orig_argv[1:]])))
