"""Data parallel training: every rank has the model, and gradients are averaged in buckets during the backward pass."""

import contextlib
import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from scaleray.common.equal_models import dense_buffers
from scaleray.config import RunConfig
from scaleray.config.strategy import StrategySettings
from scaleray.profiling.collectives import ALL_REDUCE, BROADCAST
from scaleray.records.profile_record import CollectiveRow
from scaleray.strategies.compression.hook import Compression
from scaleray.strategies.contract.parallel import OnModel, Parallel
from scaleray.strategies.contract.weight_shares import WeightShare, whole
from scaleray.strategies.traffic.bucket_arrivals import BucketArrivals

BROADCAST_BYTES = 250 * 2**20
"""Number of bytes of buffers that DDP broadcasts at a time; see `broadcast_bucket_size` of DistributedDataParallel."""


def looking_for_unused(config: RunConfig) -> RunConfig:
    """Config with the search for unused parameters that scaleray needs. Suppresses torch's advice to turn it off."""
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # another release of torch: the advice is shown
            _take_advice()
    return config.changed({"strategy.find_unused_parameters": True, "strategy.static_graph": False})


def _take_advice() -> None:
    """Let torch give its advice about unused parameters now; it does so only once in a process."""
    parameter = torch.zeros(1, requires_grad=True)
    assert dist.group.WORLD is not None
    reducer = dist.Reducer(
        [parameter], [[0]], [1024], dist.group.WORLD, [False], 1024, True, False, {0: "parameter"}, 1024
    )
    output = parameter * 1

    class Catcher(torch.autograd.Function):
        """Context in which a warning from torch's C++ code becomes a Python warning; elsewhere it goes to stderr."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            reducer.prepare_for_backward([output])
            return x.clone()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        Catcher.apply(torch.zeros(1))


def rows(
    wrapped: DistributedDataParallel, num_steps: int, compressed: list[CollectiveRow] | None = None
) -> list[CollectiveRow]:
    """All collectives of `num_steps` synchronised steps. compressed: those of a hook that sends gradients in place of
    DDP."""
    gradients = _gradient_rows(wrapped, num_steps) if compressed is None else compressed
    return [*gradients, *_other_rows(wrapped, num_steps)]


def _gradient_rows(wrapped: DistributedDataParallel, num_steps: int) -> list[CollectiveRow]:
    """All-reduces of the gradients of every bucket in this many synchronised steps. The layout of buckets changes once,
    after the first step. All buckets together are as large as the trained parameters."""
    if not num_steps:
        return []
    data = wrapped._get_ddp_logging_data()
    at_first = _count(data, "bucket_sizes")
    later = _count(data, "rebuilt_bucket_sizes") if data.get("has_rebuilt_buckets") else at_first
    trained = [p for p in wrapped._module_parameters if p.requires_grad]
    num_bytes = sum(p.numel() * p.element_size() for p in trained)
    return [_row(wrapped, ALL_REDUCE, at_first + (num_steps - 1) * later, num_steps * num_bytes)]


def _other_rows(wrapped: DistributedDataParallel, num_steps: int) -> list[CollectiveRow]:
    """Bytes that DDP sends in addition to gradients: buffers at the beginning of a step, and a map of used parameters
    if it searches for unused ones."""
    found = []
    if wrapped.find_unused_parameters and not wrapped.static_graph:
        num_parameters = sum(p.requires_grad for p in wrapped._module_parameters)
        found.append(_row(wrapped, ALL_REDUCE, num_steps, num_steps * num_parameters * torch.int32.itemsize))
    buffers: Sequence[torch.Tensor] = wrapped.modules_buffers if wrapped.forward_sync_buffers else ()
    if sizes := _in_pieces(buffers):
        found.append(_row(wrapped, BROADCAST, num_steps * len(sizes), num_steps * sum(sizes)))
    return [row for row in found if row.count]


def _count(data: dict[str, object], key: str) -> int:
    return len(str(data[key]).split(","))


def _in_pieces(buffers: Sequence[torch.Tensor]) -> list[int]:
    """Bytes of each broadcast. Buffers of one type are sent together, as torch packs them."""
    pieces: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for buffer in buffers:
        own = pieces.setdefault((buffer.dtype, buffer.device), [0])
        own[-1] += buffer.numel() * buffer.element_size()
        if own[-1] >= BROADCAST_BYTES:
            own.append(0)
    return [size for own in pieces.values() for size in own if size]


def _row(wrapped: DistributedDataParallel, operation: str, count: int, num_bytes: float) -> CollectiveRow:
    group = wrapped.process_group
    return CollectiveRow(
        rank=dist.get_rank(),
        group="dp",
        group_size=dist.get_world_size(group),
        operation=operation,
        count=count,
        num_bytes=num_bytes,
    )


def apply(model: nn.Module, mesh: DeviceMesh | None, config: RunConfig, workload: Any) -> Parallel:
    """Wrap in DistributedDataParallel over `mesh["dp"]`. Collective: rank 0's parameters and buffers go to all ranks.

    Source: Li et al. 2020, arXiv:2006.15704. Buffers such as BatchNorm's statistics follow rank 0. With
    `compression.name`, gradients are sent in fewer bytes; clipping follows."""
    if mesh is None:
        raise ValueError("ddp needs a device mesh with the axis 'dp'")
    group = mesh.get_group("dp")
    sent_a_step = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    wrapped = _wrapped(model, group, config.strategy)
    compression = None if config.compression.name == "none" else Compression(wrapped, model, group, config)
    arrivals = BucketArrivals(wrapped, model)
    num_steps = 0

    def count(step: int) -> None:
        nonlocal num_steps
        num_steps += 1

    def abandon() -> None:
        # a rank whose last forward pass was complete waits for gradients, and would communicate those of the next pass
        wrapped.reducer._reset_state()
        # a pass that ended within no_sync would leave this rank alone in not sharing buffers with the next one
        wrapped.require_forward_param_sync = True

    def share_buffers() -> None:
        # DDP does so at the start of a forward pass; after the last one the ranks' buffers differ
        for buffer in dense_buffers(model):
            dist.broadcast(buffer, group=group, group_src=0)

    def weights() -> WeightShare:
        share_buffers()
        return whole(model, keeps=dist.get_rank(group) == 0)

    def collectives() -> list[CollectiveRow]:
        compressed = None if compression is None else compression.collectives.ledger.rows()
        return rows(wrapped, num_steps, compressed)

    def close() -> None:
        arrivals.close()
        for parameter in model.parameters():
            parameter.grad = None  # a view of a bucket that goes away with the wrapper
        if compression is not None:
            compression.close()

    parallel = Parallel(
        model=wrapped,
        module=model,
        gradient_divisor=dist.get_world_size(group),
        no_sync=wrapped.no_sync,
        abandon=abandon,
        before_evaluation=share_buffers,
        weights=weights,
        after_update=count,
        tell_phases=arrivals.tell_phases,
        bytes_sent=lambda: float(num_steps * sent_a_step),
        collectives=collectives,
        arrivals=arrivals,
        close=close,
    )
    return parallel if compression is None else _with_compression(parallel, compression)


def _wrapped(model: nn.Module, group: dist.ProcessGroup, settings: StrategySettings) -> DistributedDataParallel:
    device = next(model.parameters()).device
    on_model = OnModel(model)
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # torch's way to leave parameters to the user
    sparse = [name for name, buffer in model.named_buffers() if buffer.layout != torch.strided]  # DDP sends none
    if ignored or sparse:
        names = [f"module.{name}" for name in (*ignored, *sparse)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(on_model, names)
    return DistributedDataParallel(
        on_model,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=group,
        bucket_cap_mb=settings.bucket_size_mib,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        static_graph=settings.static_graph,
        find_unused_parameters=settings.find_unused_parameters,
    )


def _with_compression(parallel: Parallel, compression: Compression) -> Parallel:
    """The same model, with the state, bytes and metrics of compressed gradients."""

    def after_update(step: int) -> None:
        parallel.after_update(step)
        compression.after_update(step)

    return dataclasses.replace(
        parallel,
        after_update=after_update,
        carry_over=compression.carry_over,
        state=compression.state,
        load_state=compression.load_state,
        bytes_sent=lambda: float(compression.collectives.sent_bytes),
        metrics=lambda: compression.metrics,
        notes=compression.notes,
    )
