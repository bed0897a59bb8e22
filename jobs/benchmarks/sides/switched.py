"""One worker of the benchmark of a profile's cost: trains with scaleray's loop, whose profile is switched off and on.

python switched.py RANK WORLD_SIZE FILE WIDTH PAIRS     FILE: where the workers of a group meet

Steps come in blocks, of which each pair has one with the profile and one without, in random order, the same on all ranks.
What the machine does to a training in a second hits both alike. Prints a list of blocks as JSON: whether the profile was
on, and the milliseconds of a step, see `FIGURES`.
"""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from steps import Toy, with_scaleray

from scaleray.common.callbacks import Callback
from scaleray.training import loop
from scaleray.training.observer import Observers
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext

WARM_UP, BLOCK, LEFT_OUT = 80, 24, 4
"""Steps before the first block, in a block, and at the begin of each, which are not counted."""
FIGURES = ("thread_ms", "clock_ms", "process_ms")
"""CPU time of the training thread and time on the clock, medians of a block; CPU time of the process, its mean."""


class Switch:
    """Takes everything away that measures the profile of a running training, and puts it back."""

    def __init__(self, run: Any, setup: Setup) -> None:
        self.run, self.is_on = run, True
        self.parameters = list(setup.parallel.module.parameters())

    def set(self, on: bool) -> None:
        """Have a profile measured from now on, or none."""
        if on == self.is_on:
            return
        self.is_on, run = on, self.run
        if on:
            run.progress.on_enter, run.observers, run.clock.profile, hooks = self.kept
        else:
            self.kept = (
                run.progress.on_enter,
                run.observers,
                run.clock.profile,
                [parameter._post_accumulate_grad_hooks for parameter in self.parameters],
            )
            run.progress.on_enter = lambda phase: None
            own = run.profile.observers
            run.observers = Observers(*(one for one in run.observers.observers if one not in own))
            run.clock.profile = SimpleNamespace(start=lambda now: None, cut=lambda step_s, now: None)
            hooks = [None] * len(self.parameters)
        for parameter, hook in zip(self.parameters, hooks, strict=True):
            parameter._post_accumulate_grad_hooks = hook


class Switched(Toy):
    """The toy model, whose profile goes off and on."""

    switch: Switch

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.blocks: list[tuple[int, bool]] = []

    def callbacks(self) -> list[Callback]:
        return [Switches(self)]


class Switches(Callback):
    """Begins a block after so many steps."""

    def __init__(self, toy: Switched) -> None:
        self.toy, self.steps, self.draw, self.next = toy, 0, random.Random(0), [True, False]

    def on_step(self, run: Any) -> None:
        self.steps += 1
        if self.steps < WARM_UP or (self.steps - WARM_UP) % BLOCK:
            return
        pair = len(self.toy.blocks) % 2
        if not pair:
            self.draw.shuffle(self.next)
        self.toy.switch.set(self.next[pair])
        self.toy.blocks.append((len(self.toy.at), self.next[pair]))


def watched(toy: Switched) -> None:
    """Have the loop hand its parts to the switch when it begins."""

    class Run(loop._Run):
        def _steps(self, setup: Setup, *rest: Any) -> str | None:
            toy.switch = Switch(self, setup)
            return super()._steps(setup, *rest)

    loop._Run = Run  # type: ignore[misc]


def measured(toy: Switched, pairs: int) -> list[dict[str, Any]]:
    """The figures of each block."""
    found = []
    for first, is_on in toy.blocks[: 2 * pairs]:
        thread, clock, process = np.diff(np.array(toy.at[first + LEFT_OUT : first + BLOCK]).T * 1e3)
        values = (float(np.median(thread)), float(np.median(clock)), float(process.mean()))
        found.append({"is_on": is_on, **dict(zip(FIGURES, values, strict=True))})
    return found


def main() -> None:
    rank, world_size, meeting, width, pairs = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    torch.set_num_threads(1)
    place = RankContext(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    toy = Switched(int(width))
    watched(toy)
    with_scaleray(toy, place, clips=False, steps=WARM_UP + (2 * int(pairs) + 1) * BLOCK)
    print(json.dumps(measured(toy, int(pairs))), flush=True)


if __name__ == "__main__":
    main()
