"""Replicas that train separately and average occasionally: local SGD, and the part that it shares with DiLoCo."""

import contextlib
import functools
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scaleray.config import RunConfig
from scaleray.records.profile_record import CollectiveRow
from scaleray.strategies import ddp, fsdp, tensor
from scaleray.strategies.apart.in_flight_exchanges import BESIDE_TRAINING
from scaleray.strategies.apart.replicas import Replicas
from scaleray.strategies.contract.parallel import Computation, OnModel, Parallel, Tensors
from scaleray.strategies.pipeline import apply as pipeline


def apply(model: nn.Module, mesh: DeviceMesh | None, config: RunConfig, workload: Any) -> Parallel:
    """Take ordinary steps for `local_sgd.warmup_steps`, then local ones, averaged every `sync_every` steps. Collective.

    With `average_momentum`, the optimizer's state is averaged together with the parameters. With sync_every 1, plain
    SGD and equal counts on all ranks, the training is that of DDP. Replicas have equal weight, so if counts differ (the
    last batch of an epoch, padded tokens), samples weigh more in a replica with fewer; `batch.drop_last` leaves such
    batches out. A replica may be spread over workers by `parallel.shard`, `tensor` and `pipeline`. Sources: Stich 2018,
    arXiv:1805.09767; after a warm-up (post-local SGD): Lin et al. 2018, arXiv:1808.07217, whose hierarchical form is
    `node_sync_every`."""
    settings = config.local_sgd
    apart = TrainingApart(model, mesh, config, workload)

    def average(group: dist.ProcessGroup | None) -> None:
        apart.replicas.average(group=group, with_momentum=settings.average_momentum)

    def after_local(since: int) -> None:
        if since % settings.sync_every == 0:
            average(None)

    return apart.parallel(after_local=after_local, synchronise_node=average)


class TrainingApart:
    """Schedule shared by local SGD and DiLoCo: a warm-up in DDP, then local steps and two kinds of synchronisation."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None, config: RunConfig, workload: Any) -> None:
        if mesh is None:
            raise ValueError("replicas that train separately need a device mesh with the axis 'dp'")
        self.settings = config.local_sgd
        bucket_mib = config.strategy.bucket_size_mib
        self.warm_up: Parallel | None = None
        self.route: nn.Module | None = None
        self.node_group: dist.ProcessGroup | None = None
        if mesh.ndim > 1:
            within = mesh[tuple(axis for axis in mesh.mesh_dim_names or () if axis != "replicate")]
            whole = within.get_group() if within.ndim == 1 else within._flatten("replica").get_group()
            axes = within.mesh_dim_names or ()
            apply_inner = pipeline.apply if "pp" in axes else tensor.apply if "tp" in axes else fsdp.apply
            inner = apply_inner(model, within, config, workload)
            group = mesh.get_group("replicate")
            self.replicas = Replicas(inner.module, group, bucket_mib=bucket_mib, inner=inner, whole=whole)
        else:
            group = mesh.get_group("dp")
            self.replicas = Replicas(model, group, bucket_mib=bucket_mib)
            if self.settings.warmup_steps:
                self.warm_up = ddp.apply(model, mesh, config, workload)
                self.route = _Route(self.warm_up.model)
            if self.settings.node_sync_every:
                self.node_group = node_group(group, config)
        self.model, self.inner = self.replicas.model, self.replicas.inner
        self.own_group = group_for_means(mesh, config) if self.settings.overlap else None
        self.has_begun = False
        self.warm_up_bytes = 0.0
        self._sent_before: list[CollectiveRow] = []

    def parallel(
        self,
        *,
        after_local: Callable[[int], None],
        synchronise_node: Callable[[dist.ProcessGroup], None],
        begin: Callable[[], None] = lambda: None,
        wait: Callable[[], object] = lambda: None,
        state: Callable[[], Tensors] = dict,
        load_state: Callable[[Tensors], None] = lambda state: None,
    ) -> Parallel:
        """Strategy in the form that the loop uses. after_local: called after each local step, with its number since the
        warm-up. begin: called before the first local step of a run, resumed or not, when replicas are equal. wait:
        waits for sums in flight."""
        warmup_steps, every, node_every = (
            self.settings.warmup_steps,
            self.settings.sync_every,
            self.settings.node_sync_every,
        )

        def before_step(step: int) -> None:
            self.inner.before_step(step)
            if step > warmup_steps and not self.has_begun:
                self._leave_warm_up()
                begin()

        def after_backward(step: int) -> None:
            if step <= warmup_steps and self.warm_up is None:
                self.replicas.average_gradients()

        def after_update(step: int) -> None:
            since = step - warmup_steps
            self.inner.after_update(step)
            if since <= 0 and self.warm_up is None:
                self.replicas.share_buffers()
            elif since <= 0 and self.warm_up is not None:
                self.warm_up.after_update(step)
                self.warm_up_bytes = self.warm_up.bytes_sent()
            else:
                if node_every is not None and since % every and since % node_every == 0:
                    assert self.node_group is not None
                    synchronise_node(self.node_group)
                after_local(since)

        def no_sync() -> contextlib.AbstractContextManager[Any]:
            return (self.warm_up or self.inner).no_sync()

        def end(inner: Callable[[], None]) -> None:
            wait()
            inner()
            for parameter in self.model.parameters():
                parameter.grad = None  # maybe a view of a bucket of the warm-up
            for group in (self.node_group, self.own_group):
                if group is not None:
                    dist.destroy_process_group(group)

        return self.replicas.parallel(
            model=self.route,
            gradient_divisor=self.replicas.size * self.inner.gradient_divisor,  # used in the warm-up
            no_sync=no_sync,
            close=lambda: end(self.inner.close),
            let_go=lambda: end(self.inner.let_go or self.inner.close),
            before_step=before_step,
            after_backward=after_backward,
            after_update=after_update,
            is_local=lambda step: step > warmup_steps,
            synchronises=lambda step: step <= warmup_steps or (step - warmup_steps) % every == 0,
            state=state,
            load_state=load_state,
            bytes_sent=lambda: self.warm_up_bytes + self.inner.bytes_sent() + self.replicas.sent.num_bytes,
            collectives=self._collectives,
        )

    def _collectives(self) -> list[CollectiveRow]:
        before = self._sent_before if self.warm_up is None else self.warm_up.collectives()
        return [*before, *self.inner.collectives(), *self.replicas.sent.rows()]

    def _leave_warm_up(self) -> None:
        self.has_begun = True
        if self.warm_up is not None:
            assert isinstance(self.route, _Route)
            self._sent_before = self.warm_up.collectives()
            self.warm_up.close()
            # DDP's hooks go with it; they do nothing without its forward
            self.warm_up, self.route.target = None, OnModel(self.model)


class _Route(nn.Module):
    """Module that runs the user's code within DDP during the warm-up, and directly on the model afterwards."""

    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        self.target = target

    def forward(self, computation: Computation) -> Any:
        return self.target(computation)


def node_group(group: dist.ProcessGroup, config: RunConfig) -> dist.ProcessGroup:
    """Process group of the ranks of `group` on this rank's node. Collective over all processes, like torch's
    `new_group`."""
    node_size, timeout = config.local_sgd.node_size, timedelta(seconds=config.scale.collective_timeout_s)
    ranks = dist.get_process_group_ranks(group)
    nodes: list[Any] = [position // node_size for position in range(len(ranks))] if node_size else [None] * len(ranks)
    if node_size is None:
        dist.all_gather_object(nodes, machine(), group=group)
    own = None
    for node in dict.fromkeys(nodes):
        its_ranks = [rank for rank, its in zip(ranks, nodes, strict=True) if its == node]
        made = dist.new_group(its_ranks, timeout=timeout)
        if nodes[dist.get_rank(group)] == node:
            own = made
    assert own is not None
    return own


def group_for_means(mesh: DeviceMesh, config: RunConfig) -> dist.ProcessGroup:
    """Process group over this rank's part of all replicas, for sums that are in flight for several steps. Collective
    over all processes."""
    timeout = timedelta(seconds=config.scale.collective_timeout_s * (1 + config.local_sgd.overlap))
    axis = (mesh.mesh_dim_names or ()).index("replicate") if mesh.ndim > 1 else 0
    own = None
    for ranks in mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist():
        made = dist.new_group(ranks, timeout=timeout, group_desc=BESIDE_TRAINING)
        own = made if dist.get_rank() in ranks else own
    assert own is not None
    return own


@functools.cache
def machine() -> tuple[str, str]:
    """Identifier shared by all processes on a machine: its boot ID, since containers may have their own host names."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return ("boot", boot.read_text().strip()) if boot.exists() else ("host", socket.gethostname())
