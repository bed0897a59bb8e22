"""DiLoCo: replicas take many steps separately, then an outer optimizer takes one with the mean of their changes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scaleray.config import RunConfig
from scaleray.config.strategy import LocalSgdSettings
from scaleray.strategies.contract.parallel import Parallel, Tensors
from scaleray.strategies.contract.weight_shares import shared_out
from scaleray.strategies.local_sgd import TrainingApart
from scaleray.strategies.sharding.shards import local

ANCHOR, MOMENTUM, IN_FLIGHT = "anchor", "momentum", "in_flight"


def apply(model: nn.Module, mesh: DeviceMesh | None, config: RunConfig, workload: Any) -> Parallel:
    """Take local steps with the configured optimizer, and an outer Nesterov step every `local_sgd.sync_every` steps.
    Collective.

    The outer gradient is the anchor minus the current parameters, averaged over the replicas. The outer step moves the
    anchor, from which all replicas continue. Inner optimizers keep their own state; buffers are averaged. The outer
    momentum and the anchor, each as large as the trained parameters, are part of a checkpoint. On another number of
    workers the momentum starts from zero, and the anchor is the mean of the replicas. With outer_learning_rate 1 and
    outer_momentum 0, this is local SGD without `average_momentum`. Source: Douillard et al. 2023, arXiv:2311.08105.
    With `fragments`, `overlap` and `mixing` it is streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512) without
    quantised sums; a fragment's outer gradient is counted from its anchor."""
    settings = config.local_sgd
    apart = TrainingApart(model, mesh, config, workload)
    trained = apart.replicas.trained
    names = [name for name, parameter in apart.model.named_parameters() if parameter.requires_grad]
    anchor: list[torch.Tensor] = []
    momentum: list[torch.Tensor] = []

    def begin() -> None:
        if not anchor:  # else they came from a checkpoint
            anchor.extend(local(parameter.detach()).clone() for parameter in trained)
            momentum.extend(torch.zeros_like(value) for value in anchor)

    fragment_of = fragments(apart.inner.parameter_names or [n for n, _ in apart.model.named_parameters()], settings)
    members = [[i for i, name in enumerate(names) if fragment_of[name] == f] for f in range(settings.fragments)]
    under_way: list[InFlight] = []

    def parts(fragment: int) -> list[torch.Tensor]:
        return [local(trained[i].detach()) for i in members[fragment]]

    @torch.no_grad()
    def outer_step(fragment: int, means: list[torch.Tensor], own: list[torch.Tensor]) -> None:
        """Move the anchor of a fragment, and set the fragment's values. own: values before averaging."""
        if not (start := [anchor[i] for i in members[fragment]]):
            return
        moved = [momentum[i] for i in members[fragment]]
        outer_gradient = [begin - mean for begin, mean in zip(start, means, strict=True)]
        torch._foreach_mul_(moved, settings.outer_momentum)
        torch._foreach_add_(moved, outer_gradient)
        torch._foreach_add_(outer_gradient, moved, alpha=settings.outer_momentum)  # Nesterov, as torch.optim.SGD has it
        torch._foreach_add_(start, outer_gradient, alpha=-settings.outer_learning_rate)
        if settings.mixing:
            start = list(torch._foreach_mul(start, 1 - settings.mixing))
            torch._foreach_add_(start, own, alpha=settings.mixing)
        torch._foreach_copy_(parts(fragment), start)

    def after_local(since: int) -> None:
        """Start averaging the next fragment, and take the outer step of the fragment that is due."""
        if since % settings.fragment_every == 0:
            fragment = (since // settings.fragment_every - 1) % settings.fragments
            own = [trained[i] for i in members[fragment]]
            buffers = apart.replicas.moving()[len(trained) :] if fragment == settings.fragments - 1 else []
            if apart.own_group is not None:
                under_way.append(InFlight(fragment, since, apart.replicas.begin_mean(own, apart.own_group)))
                apart.replicas.average(buffers, measures=False)
            else:
                before = [value.clone() for value in parts(fragment)] if settings.mixing else []
                apart.replicas.average([*own, *buffers])
                outer_step(fragment, parts(fragment), before)
        if under_way and since == under_way[0].begun + settings.overlap:
            due = under_way.pop()
            outer_step(due.fragment, due.means(), parts(due.fragment))

    def state() -> Tensors:
        saved = {f"{ANCHOR}.{name}": value for name, value in zip(names, anchor, strict=bool(anchor))}
        saved |= {f"{MOMENTUM}.{name}": value for name, value in zip(names, momentum, strict=bool(momentum))}
        for flight in under_way:
            saved[IN_FLIGHT] = torch.tensor([flight.fragment, flight.begun])
            for i, mean in zip(members[flight.fragment], flight.means(), strict=True):
                saved[f"{IN_FLIGHT}.{names[i]}"] = mean
        return saved

    def load_state(saved: Tensors) -> None:
        if saved:
            anchor[:] = [saved[f"{ANCHOR}.{n}"].to(p.device, copy=True) for n, p in zip(names, trained, strict=True)]
            momentum[:] = [
                saved[f"{MOMENTUM}.{n}"].to(p.device, copy=True) for n, p in zip(names, trained, strict=True)
            ]
        if IN_FLIGHT in saved:
            fragment, begun = saved[IN_FLIGHT].tolist()
            arrived = [saved[f"{IN_FLIGHT}.{names[i]}"].to(trained[i].device, copy=True) for i in members[fragment]]
            under_way[:] = [InFlight(fragment, begun, lambda: arrived)]

    return apart.parallel(
        after_local=after_local,
        synchronise_node=lambda node: apart.replicas.average(group=node),
        begin=begin,
        wait=lambda: [flight.means() for flight in under_way],
        state=state,
        load_state=load_state,
    )


def fragments(names: Sequence[str], settings: LocalSgdSettings) -> dict[str, int]:
    """Fragment of each parameter of a whole model: successive layers with about equally many parameters."""
    return shared_out(dict.fromkeys(names, 1), settings.fragments)


class InFlight:
    """Mean of a fragment, which the replicas form while they continue training. begun: number of the step at which it
    began, counted from the warm-up."""

    def __init__(self, fragment: int, begun: int, finish: Callable[[], list[torch.Tensor]]) -> None:
        self.fragment, self.begun = fragment, begun
        self._finish = finish
        self._means: list[torch.Tensor] | None = None

    def means(self) -> list[torch.Tensor]:
        """Mean of each parameter's part on this rank, after waiting for it. Collective."""
        self._means = self._finish() if self._means is None else self._means
        return self._means
