"""What FSDP gathers and reduces, in bytes, and how much of it is there at once."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deep_net import BLOCK_SHAPES, FROZEN_SHAPES, ROOT_SHAPES, Deep
from small_runs import make_job, same_generators
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from scaleray.data import RankBatch
from scaleray.records.text.units import GIB
from scaleray.training.setup.model_setup import prepare
from scaleray.training.step.step import TrainStep

FSDP = {"strategy.name": "fsdp"}


def one_step(place, flags, workload=None):
    """What a step of 4 rows a rank gave to collectives: (as counted, as seen at torch's functions, most units gathered)."""
    job, sources = make_job(workload or Deep(num_rows=8), {**FSDP, **flags}, world_size=place.world_size)
    with same_generators():
        setup = prepare(job.workload, job.config, job.recipe, replace(place, degrees=job.degrees))
    seen, most = [0], [0]

    def counted(call, which):
        def run(*args, **kwargs):
            tensor = kwargs.get(which[1], args[which[0]] if len(args) > which[0] else None)
            if tensor.dtype != torch.float64 or tensor.numel() > 2 + 2:  # not the step's own sums
                seen[0] += tensor.numel() * tensor.element_size()
            return call(*args, **kwargs)

        return run

    groups = [
        g
        for m in setup.parallel.module.modules()
        if isinstance(m, FSDPModule)
        for g in m._get_fsdp_state()._fsdp_param_groups
    ]
    unshard = FSDPParamGroup.unshard

    def watched(self, *args, **kwargs):
        unshard(self, *args, **kwargs)
        most[0] = max(most[0], sum(g.is_unsharded or g._all_gather_result is not None for g in groups))

    step = TrainStep(job.workload, setup, job.config, job.recipe, place, gives_tuples=False)
    rows = sources["train"].read(job.train_plan().rank_indices(0, place.rank, place.world_size))
    with (
        mock.patch.object(dist, "all_gather_single", counted(dist.all_gather_single, (1, "input"))),
        mock.patch.object(dist, "reduce_scatter_single", counted(dist.reduce_scatter_single, (1, "input"))),
        mock.patch.object(dist, "all_reduce", counted(dist.all_reduce, (0, "tensor"))),
        mock.patch.object(FSDPParamGroup, "unshard", watched),
    ):
        step(RankBatch(0, rows, len(rows["tokens"])), num_rows=8, want_norm=False)
    sent = setup.parallel.bytes_sent()
    setup.parallel.close()
    return sent, seen[0], most[0]


def padded(shapes, shards):
    """Elements of a unit when each parameter's rows are padded to equal shards."""
    return sum(math.ceil(shape[0] / shards) * shards * math.prod(shape[1:]) for shape in shapes)


@pytest.mark.parametrize("micro_size", [4, 1])
@pytest.mark.parametrize(("options", "gathers"), [({}, 2), ({"fsdp.reshard_after_forward": False}, 1)])
def test_bytes_sent_are_those_of_the_formula_and_of_the_collectives(gloo, options, gathers, micro_size):
    passes, shards = 4 // micro_size, 2
    sent, seen, _ = gloo.run(2, one_step, {**options, "batch.micro_size": micro_size})[0]
    gathered = 4 * padded(BLOCK_SHAPES, shards) * gathers + padded(ROOT_SHAPES, shards)
    reduced = 4 * padded(BLOCK_SHAPES, shards) - padded(FROZEN_SHAPES, shards) + padded(ROOT_SHAPES, shards)
    assert sent == seen == 8 * (passes * gathered / shards + reduced)


def test_sharded_accumulation_reduces_every_micro_batch(gloo):
    whole, sharded = (
        gloo.run(2, one_step, {"batch.micro_size": 1, "fsdp.accumulate": how})[0][0] for how in ("whole", "sharded")
    )
    assert sharded - whole == 3 * 8 * (4 * padded(BLOCK_SHAPES, 2) - padded(FROZEN_SHAPES, 2) + padded(ROOT_SHAPES, 2))


def test_hsdp_reduces_its_shards_once_more_between_the_replicas(gloo):
    sent, seen, _ = gloo.run(4, one_step, {"parallel.replicate": 2})[0]
    gathered = 4 * padded(BLOCK_SHAPES, 2) * 2 + padded(ROOT_SHAPES, 2)
    reduced = 4 * padded(BLOCK_SHAPES, 2) - padded(FROZEN_SHAPES, 2) + padded(ROOT_SHAPES, 2)
    assert sent == seen == 8 * (gathered / 2 + reduced + reduced / 2)


@pytest.mark.parametrize(("options", "most"), [
    ({"fsdp.prefetch": 0}, 2), ({"fsdp.prefetch": 1}, 3), ({"fsdp.prefetch": 2}, 4),
    ({"fsdp.prefetch": 3, "fsdp.max_unsharded_gib": (65 + 2 * 125) * 8 / GIB}, 3),
    ({"fsdp.reshard_after_forward": False}, 5),
])  # fmt: skip
def test_no_more_units_are_gathered_than_the_prefetch_allows(gloo, options, most):
    """The root, the unit that computes, and those ahead of it."""
    assert {m for _, _, m in gloo.run(2, one_step, options)} == {most}


def test_gathering_in_bf16_halves_what_is_gathered_and_reduces_in_fp32(gloo):
    flags = {"precision.dtype": "fp32"}
    full, half, both = (
        gloo.run(2, one_step, {**flags, **more})[0][0]
        for more in (
            {},
            {"fsdp.parameter_dtype": "bf16"},
            {"fsdp.parameter_dtype": "bf16", "fsdp.reduce_dtype": "bf16"},
        )
    )
    gathered = (4 * padded(BLOCK_SHAPES, 2) * 2 + padded(ROOT_SHAPES, 2)) / 2
    reduced = 4 * padded(BLOCK_SHAPES, 2) - padded(FROZEN_SHAPES, 2) + padded(ROOT_SHAPES, 2)
    assert (full, half, both) == (4 * (gathered + reduced), 2 * gathered + 4 * reduced, 2 * (gathered + reduced))
