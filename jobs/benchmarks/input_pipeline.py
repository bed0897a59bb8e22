"""How fast rows reach the training code: scaleray's pipeline against torch's DataLoader, over the same rows.

Shuffled batches, delivered to one consumer as torch tensors that it may write to, for small rows, long rows of tokens
and images that are decoded, cropped and flipped. scaleray's rows are read by a thread of the consumer's process
(`worker`) and by Ray tasks on two Ray CPUs (`ray`); DataLoader has 0 and 2 worker processes.

    python jobs/benchmarks/input_pipeline.py --repeats 5
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import harness
import input_cases
import psutil
import torch
from input_cases import Batch, Case

from scaleray.launch.cluster.connection import DRIVER_ENVIRONMENT, OWN_ENVIRONMENT

RULES = """\
Each side delivers shuffled epochs to one consumer, which keeps the number of each row and checks it against the row's
content: every row arrived exactly once an epoch. The clock runs from before the iterator is made to after the last
batch. `plain` is a DataLoader over a map-style Dataset with the default collate; `batched` one whose Dataset gives the
rows of a list of indices at once (a BatchSampler as its sampler), as an experienced user writes it; both with 0 and
with 2 worker processes. `worker` and `ray` say who reads for scaleray (`data.readers`), with default settings and two
Ray CPUs for tasks; `auto` chooses {auto}. Each side runs once before the rounds, unmeasured. Sides are in random order
in each round (seed {seed}), {repeats} rounds. Medians (smallest-largest); ratios are taken in each round, to the
fastest DataLoader of that round, and to the faster plain one. A round is thrown out where other processes of the machine took more than
{foreign:.0%} of its cores' time during any side of the case; how many rounds are left stands in the table.
All sides run with the malloc settings of a scaleray worker, which save page faults for either. CPU s: of this process
and its children, Ray's included, for the same rows."""
DATALOADERS = ("plain_0", "plain_2", "batched_0", "batched_2")
FOREIGN_SHARE = 0.15
TASK_CPUS = 2.0
WORKER_MALLOC = {name: value for name, value in DRIVER_ENVIRONMENT.items() if name.startswith("MALLOC_")}


def dataloader_sides(case: Case) -> Iterator[str]:
    """Names of the DataLoader sides of a case."""
    yield from (f"{kind}_{workers}" for kind in case.datasets for workers in (0, 2))


class Scaleray:
    """Sources of a case as a worker of a run with one rank reads them, under a Ray that is up."""

    def __init__(self, case: Case) -> None:
        import ray

        from scaleray.data import Split, as_source

        self.case = case
        self.sources = {name: as_source(given, split="train") for name, given in case.sources.items()}
        self.splits = {name: Split.of("train", source) for name, source in self.sources.items()}
        self.references = {name: ray.put(source) for name, source in self.sources.items()}

    def sides(self) -> Iterator[str]:
        yield from (f"{name}_{readers}" for name in self.sources for readers in ("worker", "ray"))

    def auto(self, name: str) -> str:
        """Who reads a source under `data.readers: auto`."""
        return self.splits[name].read_by("auto")

    def batches(self, side: str, seed: int) -> Iterator[Batch]:
        """Epochs as a worker of a run with one rank and otherwise default data settings reads them."""
        from scaleray.config.data import DataSettings
        from scaleray.data import Input, Part, RaySources, StepPlan

        name, _, readers = side.rpartition("_")
        source, settings = self.sources[name], DataSettings(readers=readers)
        plan = StepPlan(
            source.num_rows,
            self.case.batch_size,
            seed=seed,
            group_sizes=source.group_sizes,
            window_rows=settings.window_rows,
        )
        part = Part(plan, rank=0, world_size=1, first_step=0, last_step=plan.steps_per_epoch * self.case.epochs)
        stored = RaySources({"train": self.references[name]}, TASK_CPUS)
        stream = Input(stored, settings, False, lambda: float("inf"), harness.log).open(self.splits[name], part)
        for batch in stream:
            yield {column: torch.from_numpy(values) for column, values in batch.columns.items()}
        stream.close(wait_s=30)


def consume(case: Case, open_batches: Callable[[], Iterator[Batch]]) -> harness.Measurement:
    """Read all epochs and check that every row came exactly once in each, whole."""
    numbers, first_batch_s = [], None
    own_s, machine_s = cpu_seconds()
    started = time.perf_counter()
    for batch in open_batches():
        first_batch_s = first_batch_s or time.perf_counter() - started
        numbers.append(case.row_numbers(batch).clone())
    wall_s = time.perf_counter() - started
    own_after_s, machine_after_s = cpu_seconds()
    arrived = torch.cat(numbers).reshape(case.epochs, case.num_rows)
    if not torch.equal(arrived.sort(dim=1).values, torch.arange(case.num_rows).expand(case.epochs, -1)):
        raise RuntimeError(f"{case.name}: rows are missing, or came twice")
    if torch.equal(arrived[0], arrived[0].sort().values):
        raise RuntimeError(f"{case.name}: the rows arrived in order, not shuffled")
    cpu_s = own_after_s - own_s
    foreign_s = max(0.0, machine_after_s - machine_s - cpu_s)
    return {
        "wall_s": wall_s,
        "rows_per_s": case.num_rows * case.epochs / wall_s,
        "first_batch_s": first_batch_s,
        "cpu_s": cpu_s,
        "foreign_share": foreign_s / (wall_s * (psutil.cpu_count() or 1)),
        "load": os.getloadavg()[0],
    }


def cpu_seconds() -> tuple[float, float]:
    """CPU seconds so far of this process and its children, ended ones included, and of the whole machine."""
    own, this = 0.0, psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        own += times.user + times.system
        if process == this:
            own += times.children_user + times.children_system
    machine = psutil.cpu_times()
    return own, sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[list[harness.Measurement], dict[str, str]]:
    """All rounds of all sides of all cases, in one process with one Ray cluster; and who reads under `auto`."""
    import ray

    makers: dict[str, Callable[[], Case]] = {
        "rows": lambda: input_cases.small_rows(folder, arguments.rows),
        "tokens2048": lambda: input_cases.tokens(folder, arguments.tokens, 2048),
        "tokens8192": lambda: input_cases.tokens(folder, arguments.tokens, 8192),
        "images": lambda: input_cases.images(folder, arguments.images),
    }
    found, auto = [], {}
    for key in arguments.cases:
        # a cluster for each case, whose tasks find no rows of another one
        harness.start_ray(num_cpus=2, include_dashboard=False)
        case = makers[key]()
        ours = Scaleray(case)
        auto |= {f"{case.name}, {name}": ours.auto(name) for name in case.sources}
        sides = [side for side in (*ours.sides(), *dataloader_sides(case)) if arguments.only in side]

        def run(side: str, seed: int, case: Case = case, ours: Scaleray = ours) -> harness.Measurement:
            kind, _, workers = side.rpartition("_")
            if side not in DATALOADERS:
                return consume(case, lambda: ours.batches(side, seed))
            options = {"batch_size": case.batch_size, "num_workers": int(workers), "is_batched": kind == "batched"}
            epochs = range(seed, seed + case.epochs)
            return consume(case, lambda: input_cases.dataloader_batches(case.datasets[kind], epochs=epochs, **options))

        for side in sides:
            run(side, seed=0)
        for number, side in harness.interleaved(sides, repeats=arguments.repeats, seed=arguments.seed):
            found.append({"case": case.name, "round": number, "side": side, **run(side, seed=1 + number)})
            last = found[-1]
            harness.log(
                f"{case.name} round {number + 1}: {side:23} {last['rows_per_s']:9.0f} rows/s, "
                f"{last['cpu_s']:.2f} CPU s, foreign {last['foreign_share']:.0%}"
            )
        ray.shutdown()
    return found, auto


def quiet_rounds(found: list[harness.Measurement]) -> list[harness.Measurement]:
    """Measurements of the rounds that nothing else on the machine disturbed."""
    disturbed = {(m["case"], m["round"]) for m in found if m["foreign_share"] > FOREIGN_SHARE}
    return [m for m in found if (m["case"], m["round"]) not in disturbed]


def describe(found: list[harness.Measurement], auto: dict[str, str], arguments: argparse.Namespace) -> str:
    """The rules and a table for each case."""
    rules = RULES.format(
        auto="; ".join(f"{reader} for {what}" for what, reader in auto.items()),
        seed=arguments.seed,
        repeats=arguments.repeats,
        foreign=FOREIGN_SHARE,
    )
    kept, parts = quiet_rounds(found), [rules]
    for case in dict.fromkeys(m["case"] for m in found):
        own_case = [m for m in kept if m["case"] == case]
        rows = []
        for side in dict.fromkeys(m["side"] for m in own_case):
            own = [m for m in own_case if m["side"] == side]
            to_plain, to_any = (
                harness.ratios(own_case, "rows_per_s", side=side, baselines=baselines)
                for baselines in (DATALOADERS[:2], DATALOADERS)
            )
            rows.append(
                [
                    side,
                    harness.show([m["rows_per_s"] / 1000 for m in own], "{:.1f}"),
                    harness.show([m["first_batch_s"] for m in own], "{:.3f}"),
                    harness.show([m["cpu_s"] for m in own], "{:.2f}"),
                    harness.show(to_any, "{:.2f}"),
                    harness.show(to_plain, "{:.2f}"),
                    harness.show([m["foreign_share"] * 100 for m in own], "{:.0f}"),
                ]
            )
        rounds = len({m["round"] for m in own_case})
        header = [
            "side",
            "1000 rows/s",
            "first batch, s",
            "CPU s",
            "ratio to the fastest",
            "to plain",
            "foreign CPU, %",
        ]
        parts.append(f"## {case}: {rounds} of {arguments.repeats} rounds\n\n{harness.table(header, rows)}")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--tokens", type=int, default=2**25)
    parser.add_argument("--images", type=int, default=1_536)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the sides within each round")
    parser.add_argument("--only", default="", help="sides whose names contain this")
    cases = ["rows", "tokens2048", "tokens8192", "images"]
    parser.add_argument("--cases", type=lambda text: text.split(","), default=cases, help=",".join(cases))
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(cases):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    if not os.environ.keys() >= WORKER_MALLOC.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**WORKER_MALLOC, **os.environ})
    conditions = harness.conditions(["torch", "ray", "numpy", "pyarrow", "pillow"])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ.update({**harness.ray_environment(folder), **OWN_ENVIRONMENT})  # as in a Ray of scaleray's own
        found, auto = measure(arguments, Path(folder))
    harness.write_report(
        "input_pipeline",
        title="Input pipeline",
        text=describe(found, auto, arguments),
        record={"conditions": conditions, "settings": harness.arguments_of(arguments), "measurements": found},
        folder=arguments.results,
    )


if __name__ == "__main__":
    main()
