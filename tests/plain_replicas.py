"""Replicas that train apart, one after the other in plain torch: the oracle of local SGD and DiLoCo."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from small_runs import make_job, plain_optimizer, same_generators
from torch import nn

from scaleray.common.seeding import seed_everything, stream_seed


class Replica:
    """One replica in plain torch, which takes whole batches."""

    def __init__(self, workload: Any, config: Any) -> None:
        seed_everything(stream_seed(config.seed, "model"))
        self.workload, self.clip_norm = workload, config.optimizer.clip_norm or float("inf")
        self.model = workload.build_model().double()
        self.values = [p.data for p in self.model.parameters()]
        self.optimizer = plain_optimizer(config, list(self.model.parameters()))

    def gradients(self, rows: dict[str, np.ndarray]) -> tuple[float, float]:
        """Set the gradients of the summed loss; returns it, and the count."""
        batch = {n: torch.from_numpy(v) for n, v in rows.items()}
        batch = {n: v.double() if v.is_floating_point() else v for n, v in batch.items()}
        self.optimizer.zero_grad()
        total, count = self.workload.loss(self.model, batch)
        total.backward()
        return total.item(), float(count)

    def update(self, count: float) -> float:
        """Take a step with the gradients divided by a count; returns their norm."""
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= max(count, 1)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        return float(norm)


class Stream:
    """Outer steps of streaming DiLoCo, one fragment after the other. fragments: positions of the parameters of each;
    columns: values of each parameter in all replicas."""

    def __init__(self, fragments: list[list[int]], columns: list[list[torch.Tensor]], settings: Any) -> None:
        self.fragments, self.columns, self.settings = fragments, columns, settings
        self.every = settings.sync_every // len(fragments)
        self.sums: list[tuple[int, int, list[torch.Tensor]]] = []

    def begin(self) -> None:
        """Begin at the present values, which are equal."""
        self.anchors = [column[0].clone() for column in self.columns]
        rates = {"momentum": self.settings.outer_momentum, "nesterov": True}
        of = [[self.anchors[i] for i in positions] for positions in self.fragments]
        self.outer = [torch.optim.SGD(own, self.settings.outer_learning_rate, **rates) for own in of]

    def after(self, since: int) -> None:
        """Do what is due after a local step."""
        if since % self.every == 0:
            number = (since // self.every - 1) % len(self.fragments)
            means = [sum(self.columns[i]) / len(self.columns[i]) for i in self.fragments[number]]
            self.sums.append((since + self.settings.overlap, number, means))
        if self.sums and self.sums[0][0] == since:
            _, number, means = self.sums.pop(0)
            for i, mean in zip(self.fragments[number], means, strict=True):
                self.anchors[i].grad = self.anchors[i] - mean
            self.outer[number].step()
            share = self.settings.mixing
            for i in self.fragments[number]:
                for value in self.columns[i]:
                    value.copy_(share * value + (1 - share) * self.anchors[i])


def simulated(
    workload: Any, flags: dict[str, Any], *, num: int = 2, workers: int = 4, fragments: list[list[int]] | None = None
) -> dict[str, Any]:
    """The training of `num` replicas of equal numbers of workers with samples, one after the other: losses and norms as
    recorded, the mean of the replicas at the end. fragments: those of streaming DiLoCo."""
    job, sources = make_job(workload, flags, world_size=4)
    config, plan, own = job.config, job.train_plan(), job.config.local_sgd
    losses, norms = [], []
    with same_generators():
        replicas = [Replica(workload, config) for _ in range(num)]
    columns = [list(values) for values in zip(*(r.values for r in replicas), strict=True)]
    anchor = [column[0].clone() for column in columns]
    outer = torch.optim.SGD(anchor, own.outer_learning_rate, momentum=own.outer_momentum, nesterov=True)
    stream = None if fragments is None else Stream(fragments, columns, own)
    if stream is not None:
        stream.begin()
    for step in range(job.recipe.total_steps):
        ranks = np.array_split(np.arange(workers), num)
        rows = [np.concatenate([plan.rank_indices(step, int(r), workers) for r in part]) for part in ranks]
        found = []
        for workload.replica, (replica, own_rows) in enumerate(zip(replicas, rows, strict=True)):
            found.append(replica.gradients(sources["train"].read(own_rows)))
        total, count = map(sum, zip(*found, strict=True))
        since = step + 1 - own.warmup_steps
        if since <= 0:
            for parameters in zip(*(r.model.parameters() for r in replicas), strict=True):
                mean = sum(p.grad for p in parameters if p.grad is not None)
                for p in parameters:
                    p.grad = mean.clone()
        counts = [count] * num if since <= 0 else [own_count for _, own_count in found]
        first, *_ = [replica.update(own_count) for replica, own_count in zip(replicas, counts, strict=True)]
        norms.append(first)
        if since <= 0:
            anchor_of(columns, anchor)
            if stream is not None:
                stream.begin()
        meets = since <= 0 or since % own.sync_every == 0
        is_last = step + 1 == job.recipe.total_steps
        losses.append(total / count if meets or is_last else found[0][0] / max(found[0][1], 1))
        if stream is not None and since > 0:
            stream.after(since)
        elif since > 0 and meets:
            synchronise(config, replicas, columns, anchor, outer)
    mean = {
        name: torch.stack([r.model.state_dict()[name] for r in replicas]).mean(dim=0)
        for name, value in replicas[0].model.state_dict().items()
        if value.is_floating_point()
    }
    return {"losses": losses, "norms": norms, "weights": mean}


def anchor_of(columns: list[list[torch.Tensor]], anchor: list[torch.Tensor]) -> None:
    for start, column in zip(anchor, columns, strict=True):
        start.copy_(column[0])


def synchronise(config: Any, replicas: list[Replica], columns: Any, anchor: Any, outer: Any) -> None:
    """Average, or take an outer step, as the strategy of the config does."""
    for start, column in zip(anchor, columns, strict=True):
        mean = torch.stack(column).mean(dim=0)
        start.grad = start - mean
        for value in column:
            value.copy_(mean)
    if config.strategy.name == "diloco":
        outer.step()
        for start, column in zip(anchor, columns, strict=True):
            for value in column:
                value.copy_(start)
    elif config.local_sgd.average_momentum:
        for parameters in zip(*(r.model.parameters() for r in replicas), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                states = [r.optimizer.state[p][key] for r, p in zip(replicas, parameters, strict=True)]
                mean = torch.stack(states).mean(dim=0)
                for state in states:
                    state.copy_(mean)
    for name, first in replicas[0].model.named_buffers():
        if first.is_floating_point():
            buffers = [dict(r.model.named_buffers())[name] for r in replicas]
            mean = torch.stack(buffers).mean(dim=0)
            for buffer in buffers:
                buffer.copy_(mean)
