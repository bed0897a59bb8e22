"""What is FSDP's own: every option trains as one process does, what is gathered when, and the model before and after."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from small_runs import (
    Classify,
    Tokens,
    WithBatchNorm,
    largest_difference,
    make_job,
    relative_differences,
    same_generators,
    train,
    train_alone,
    train_in_plain_torch,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from verified import judged

from scaleray.config.fsdp import FsdpSettings
from scaleray.data import RankBatch
from scaleray.errors import ConfigError, InitialisationError, WorkloadError
from scaleray.strategies import fsdp
from scaleray.strategies.paged_build import PagedBuild
from scaleray.strategies.units import GIB, choose_units, prefetch_distance
from scaleray.training import model_setup
from scaleray.training.model_setup import prepare
from scaleray.training.place import Place
from scaleray.training.step import TrainStep

FSDP = {"strategy.name": "fsdp"}
STEPS = 4  # of 8 rows; the last has the 2 that are left of 26


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, scale):
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * scale


class Net(nn.Module):
    """Embedding and head tied, four blocks, a buffer that is not saved; the second block's first layer is frozen."""

    def __init__(self, vocabulary, width=5, depth=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.0, width), persistent=False)
        self.blocks[1].up.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.scale)
        return self.head(self.norm(x))


class Deep(Tokens):
    def build_model(self):
        return Net(self.vocabulary)

    def blocks(self, model):
        return model.blocks


OPTIONS = {
    "as it is": {},
    "ZeRO-2": {"fsdp.reshard_after_forward": False},
    "no prefetch": {"fsdp.prefetch": 0},
    "far prefetch": {"fsdp.prefetch": 3},
    "by size": {"fsdp.wrap": "size", "fsdp.wrap_min_parameters": 50},
    "by class": {"fsdp.wrap": "class", "fsdp.wrap_classes": ["Linear", "Block"]},
    "bounded": {"fsdp.prefetch": 3, "fsdp.max_unsharded_gib": 400 * 8 / GIB},
    "sharded accumulation": {"fsdp.accumulate": "sharded"},
    "unused as zero": {"fsdp.reduce_unused": True},
    "built in pages": {"fsdp.build_gib": 1e-9},
    "HSDP": {"fsdp.replicas": 2},
    "HSDP, sharded accumulation": {"fsdp.replicas": 2, "fsdp.accumulate": "sharded"},
}
CLIPPED = {"optimizer.name": "adamw", "optimizer.learning_rate": 0.01, "optimizer.clip_norm": 0.3}


ON_FOUR = {"as it is", "ZeRO-2", "by size", "built in pages", "HSDP", "HSDP, sharded accumulation"}


@pytest.mark.parametrize(
    ("world_size", "options"),
    [pytest.param(4 if name in ON_FOUR else 2, o, id=name) for name, o in OPTIONS.items()]
    + [pytest.param(2, {}, id="on two")],
)
def test_every_option_is_verified_with_accumulation_and_clipping(gloo, world_size, options):
    outcome = gloo.run(world_size, judged, Deep(), {**FSDP, **CLIPPED, **options}, 2, STEPS)[0]
    assert outcome.verdict == "equal" and outcome.words == "", outcome
    assert outcome.comparison.largest < 1e-12
    assert outcome.own.largest < 1e-3


def test_ranks_with_unequal_numbers_of_rows_run_equally_many_passes(gloo):
    """The last step has 5 rows: 3 and 2, in micro-batches of one."""
    flags = {"batch.micro_size": 1}
    finished = gloo.run(2, train, Deep(num_rows=29), {**FSDP, **flags})[0]
    plain = train_in_plain_torch(Deep(num_rows=29), flags)
    assert max(relative_differences(plain.losses, finished.losses)) < 1e-12
    assert largest_difference(plain.weights, finished.weights) < 1e-12


# units


def units_of(model, workload=None, **settings):
    return choose_units(model, FsdpSettings(**settings), workload)


def test_the_units_are_the_blocks_and_the_rest_is_the_roots():
    units = units_of(Net(11), Deep())
    assert units.names == [f"blocks.{n}" for n in range(4)]
    assert units.sizes == [125] * 4 and units.root_size == 55 + 10 and units.notes == []


def test_without_blocks_the_model_is_one_unit_and_a_note_says_so():
    units = units_of(Net(11), Tokens())
    assert units.modules == [] and units.root_size == 4 * 125 + 65
    assert "whole model is one unit" in units.notes[0]


@pytest.mark.parametrize("least", [1, 10, 60, 125, 126, 10**6])
def test_every_unit_by_size_is_large_enough_and_every_parameter_is_in_one(least):
    units = units_of(Net(11), wrap="size", wrap_min_parameters=least)
    assert all(size >= least for size in units.sizes)
    assert sum(units.sizes) + units.root_size == 4 * 125 + 65
    assert not any(isinstance(module, nn.ModuleList) for module in units.modules)


def test_a_unit_that_shares_a_parameter_with_the_rest_is_left_to_the_root():
    units = units_of(Net(11), wrap="class", wrap_classes=("Embedding", "Linear"))
    assert [name for name in units.names if "blocks" not in name] == [] and len(units.names) == 8
    assert any("embedding is no unit" in note for note in units.notes)
    assert any("head is no unit" in note for note in units.notes)


def test_a_class_that_the_model_does_not_have_is_refused_with_those_it_has():
    with pytest.raises(ConfigError, match=r"Blok.*Block, Embedding"):
        units_of(Net(11), wrap="class", wrap_classes=("Blok",))


def test_blocks_of_another_model_are_refused():
    class Other(Deep):
        def blocks(self, model):
            return [nn.Linear(1, 1)]

    with pytest.raises(WorkloadError, match="blocks"):
        units_of(Net(11), Other())


@pytest.mark.parametrize(("parameters", "distance"), [(10**6, 3), (65 + 4 * 125, 3), (65 + 3 * 125, 2), (65 + 125, 0)])
def test_the_bound_on_gathered_parameters_shortens_the_prefetch(parameters, distance):
    settings = FsdpSettings(prefetch=3, max_unsharded_gib=parameters * 4 / GIB)
    assert prefetch_distance(units_of(Net(11), Deep()), settings, bytes_per_parameter=4) == distance


def test_a_bound_below_one_unit_is_refused_with_what_it_takes():
    units = units_of(Net(11), Deep())
    with pytest.raises(ConfigError, match="largest unit"):
        prefetch_distance(units, FsdpSettings(max_unsharded_gib=189 * 4 / GIB), bytes_per_parameter=4)
    settings = FsdpSettings(max_unsharded_gib=564 * 4 / GIB, reshard_after_forward=False)
    with pytest.raises(ConfigError, match="whole model"):
        prefetch_distance(units, settings, bytes_per_parameter=4)


# communication


def one_step(place, flags, workload=None):
    """What a step of 4 rows a rank gave to collectives: (as counted, as seen at torch's functions, most units gathered)."""
    job, sources = make_job(workload or Deep(num_rows=8), {**FSDP, **flags}, world_size=place.world_size)
    with same_generators():
        setup = prepare(job.workload, job.config, job.recipe, place)
    seen, most = [0], [0]

    def counted(call, which):
        def run(*args, **kwargs):
            tensor = kwargs.get(which[1], args[which[0]] if len(args) > which[0] else None)
            if tensor.dtype != torch.float64 or tensor.numel() > 2 + 2:  # not the step's own sums
                seen[0] += tensor.numel() * tensor.element_size()
            return call(*args, **kwargs)

        return run

    groups = [g for m in setup.parallel.module.modules() if isinstance(m, FSDPModule) for g in m._get_fsdp_state()._fsdp_param_groups]  # fmt: skip
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


BLOCK = [(5,), (5,), (10, 5), (10,), (5, 10), (5,)]
FROZEN = [(10, 5), (10,)]
ROOT = [(11, 5), (5,), (5,)]


@pytest.mark.parametrize("micro_size", [4, 1])
@pytest.mark.parametrize(("options", "gathers"), [({}, 2), ({"fsdp.reshard_after_forward": False}, 1)])
def test_bytes_sent_are_those_of_the_formula_and_of_the_collectives(gloo, options, gathers, micro_size):
    passes, shards = 4 // micro_size, 2
    sent, seen, _ = gloo.run(2, one_step, {**options, "batch.micro_size": micro_size})[0]
    gathered = 4 * padded(BLOCK, shards) * gathers + padded(ROOT, shards)
    reduced = 4 * padded(BLOCK, shards) - padded(FROZEN, shards) + padded(ROOT, shards)
    assert sent == seen == 8 * (passes * gathered / shards + reduced)


def test_sharded_accumulation_reduces_every_micro_batch(gloo):
    whole, sharded = (
        gloo.run(2, one_step, {"batch.micro_size": 1, "fsdp.accumulate": how})[0][0] for how in ("whole", "sharded")
    )
    assert sharded - whole == 3 * 8 * (4 * padded(BLOCK, 2) - padded(FROZEN, 2) + padded(ROOT, 2))


def test_hsdp_reduces_its_shards_once_more_between_the_replicas(gloo):
    sent, seen, _ = gloo.run(4, one_step, {"fsdp.replicas": 2})[0]
    gathered = 4 * padded(BLOCK, 2) * 2 + padded(ROOT, 2)
    reduced = 4 * padded(BLOCK, 2) - padded(FROZEN, 2) + padded(ROOT, 2)
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
    gathered = (4 * padded(BLOCK, 2) * 2 + padded(ROOT, 2)) / 2
    reduced = 4 * padded(BLOCK, 2) - padded(FROZEN, 2) + padded(ROOT, 2)
    assert (full, half, both) == (4 * (gathered + reduced), 2 * gathered + 4 * reduced, 2 * (gathered + reduced))


# precision


class SeesTypes(Deep):
    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        self.seen = (model(batch["tokens"][:, :-1]).dtype, total.dtype)
        return total, count


def types_and_losses(place, flags):
    workload = SeesTypes(num_rows=40)
    finished = train(place, workload, {**FSDP, **flags})
    return workload.seen, finished.losses, {value.dtype for value in finished.weights.values()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("reduce", [None, "bf16"])
def test_parameters_used_in_bf16_train_near_fp32_and_the_loss_sees_fp32(gloo, dtype, reduce):
    flags = {"precision.dtype": dtype, "fsdp.parameter_dtype": "bf16", "fsdp.reduce_dtype": reduce}
    seen, losses, dtypes = gloo.run(2, types_and_losses, flags)[0]
    exact = train_alone(Deep(num_rows=40), {"precision.dtype": "fp32"}).losses
    assert seen == (torch.float32, torch.float32) and dtypes == {torch.float32}
    assert losses != exact and losses == pytest.approx(exact, rel=0.03)  # bf16 keeps 8 bits of a number


@pytest.mark.parametrize("key", ["fsdp.parameter_dtype", "fsdp.reduce_dtype"])
def test_types_that_do_not_go_with_the_precision_are_refused(key):
    with pytest.raises(ConfigError, match="loss scaling"):
        make_job(Deep(), {**FSDP, "precision.dtype": "bf16", key: "fp16"}, world_size=2)
    with pytest.raises(ConfigError, match="float64"):
        make_job(Deep(), {**FSDP, key: "bf16"}, world_size=2)
    make_job(Deep(), {**FSDP, "precision.dtype": "fp16", key: "fp16"}, world_size=2)


@pytest.mark.parametrize(("flags", "workers", "says"), [
    ({"fsdp.replicas": 3}, 4, "divide the 4 workers"), ({"fsdp.replicas": 4}, 4, "would each hold everything"),
    ({"fsdp.cpu_offload": True}, 2, "no GPU"), ({"fsdp.replicas": 2, "scale.workers": {"min": 2, "max": 4}}, None, "elastic"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_starts(flags, workers, says):
    with pytest.raises(ConfigError, match=says):
        make_job(Deep(), {**FSDP, "scale.workers": workers, **flags}, world_size=workers or 4)


def test_classes_without_wrap_class_are_refused():
    with pytest.raises(ConfigError, match="belong together"):
        make_job(Deep(), {**FSDP, "fsdp.wrap_classes": ["Block"]}, world_size=2)


# norms


def norms(place):
    torch.manual_seed(0)
    whole = [torch.randn(n, 3, dtype=torch.float64) for n in (1, 5, 8)]
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    spread = [
        distribute_tensor(whole[0], line, [Shard(0)]),
        distribute_tensor(whole[1], square, [Replicate(), Shard(0)]),
        distribute_tensor(whole[2], square, [Shard(0), Shard(1)]),
    ]
    plain = torch.randn(4, dtype=torch.float64)
    huge = distribute_tensor(torch.full((4, 2), 1e30), line, [Shard(0)])
    return (
        fsdp.total_norm([*spread, plain]).item(), torch.nn.utils.get_total_norm([*whole, plain]).item(),
        fsdp.total_norm([huge]).item(), fsdp.total_norm([]).item(),
    )  # fmt: skip


def test_the_norm_of_whole_and_sharded_gradients_on_several_meshes_is_that_of_the_whole(gloo):
    results = gloo.run(4, norms)
    assert len(set(results)) == 1  # to the bit, or ranks would clip by different factors
    ours, plain, huge, none = results[0]
    assert ours == pytest.approx(plain, rel=1e-14) and huge == pytest.approx(1e30 * math.sqrt(8)) and none == 0


# the model before


class EachItsOwn(Deep):
    def build_model(self):
        model = super().build_model()
        with torch.no_grad():
            model.blocks[2].up.weight[3, 1] += dist.get_rank() == 1
        return model


@pytest.mark.parametrize("flags", [{}, {"fsdp.build_gib": 1e-9}])
def test_ranks_that_built_different_parameters_are_found_before_they_are_sharded(gloo, flags):
    with pytest.raises(InitialisationError, match=r"blocks\.2\.up\.weight differs between rank 0 and rank 1"):
        gloo.run(2, train, EachItsOwn(), {**FSDP, **flags})


class Scalar(Classify):
    def build_model(self):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.factor = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.0))

            def forward(self, x):
                return self.layer(x) * self.factor

        return Scaled()


class Mixed(Classify):
    def build_model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3).bfloat16())


@pytest.mark.parametrize(("workload", "says"), [(Scalar, "factor"), (Mixed, "several types")])
def test_a_model_that_cannot_be_sharded_is_refused_with_the_reason(gloo, workload, says):
    with pytest.raises(WorkloadError, match=says):
        gloo.run(2, train, workload(), {**FSDP, "precision.dtype": "fp32"})


class DataDecides(Deep):
    """A rank uses the feed-forward layer of the first block only if its rows say so."""

    def build_model(self):
        model = super().build_model()
        block = model.blocks[0]
        original = block.forward
        block.forward = lambda x, scale: original(x, scale) if self.uses else block.norm(x)
        return model

    def loss(self, model, batch):
        self.uses = bool((batch["tokens"][:, 0] % 2 == 0).any())
        return super().loss(model, batch)


class InPlain(DataDecides):
    """One row after another, as each of two ranks has one."""

    def loss(self, model, batch):
        parts = [super(InPlain, self).loss(model, {n: v[i : i + 1] for n, v in batch.items()}) for i in range(2)]
        return sum(total for total, _ in parts), sum(count for _, count in parts)


def test_a_path_that_only_some_ranks_take_is_trained_with_reduce_unused(gloo):
    # without momentum, which a gradient of zero keeps going and none does not: some steps take the path on no rank
    flags = {"batch.global_size": 2, "batch.micro_size": 1, "optimizer.momentum": 0.0}
    plain = train_in_plain_torch(InPlain(num_rows=12), flags)
    finished = gloo.run(2, train, DataDecides(num_rows=12), {**FSDP, **flags, "fsdp.reduce_unused": True})[0]
    assert max(relative_differences(plain.losses, finished.losses)) < 1e-12


# building in pages


class ManyInits(Deep):
    """Initialised in several passes, by data-dependent and by numpy-reading code, on top of what torch drew."""

    def build_model(self):
        model = Net(self.vocabulary, width=64, depth=8)

        def init(module):
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)

        model.apply(init)
        nn.init.orthogonal_(model.blocks[0].up.weight)
        with torch.no_grad():
            for block in model.blocks:
                block.down.weight.mul_(0.5)
            model.blocks[2].up.weight += float(model.blocks[0].up.weight.numpy().mean())
        model.plain = torch.ones(3000)  # neither parameter nor buffer
        return model


def initial(place, flags):
    """(hash, most bytes whole at once in building, whole model in bytes, what is no parameter)."""
    job, _ = make_job(ManyInits(), {**FSDP, **flags}, world_size=place.world_size)
    most, builds = [0], []

    class Watched(PagedBuild):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            builds.append(self)

        def __torch_dispatch__(self, *args, **kwargs):
            result = super().__torch_dispatch__(*args, **kwargs)
            alive = [p for p in self._pages.values() if not p.storage.expired() and p.kept is None]
            most[0] = max(most[0], sum(p.num_bytes for p in alive))
            return result

    with same_generators(), mock.patch.object(model_setup, "PagedBuild", Watched):
        setup = prepare(job.workload, job.config, job.recipe, place)
    module = setup.parallel.module
    others = module.plain.sum().item(), module.scale.sum().item()
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    return setup.initial_hash, most[0] if builds else None, size, others


def test_a_model_built_in_pages_has_the_initial_values_of_an_ordinary_build(gloo):
    whole = initial(Place(), {})
    assert whole[1] is None
    for world_size in (2, 3):
        for rank in gloo.run(world_size, initial, {"fsdp.build_gib": 60_000 / GIB, "batch.global_size": 12}):
            assert rank[0] == whole[0] and rank[3] == pytest.approx(whole[3], rel=1e-12)
            # the bound, and what drawing the largest layer has at the same time
            assert 0 < rank[1] < 60_000 + 2 * 128 * 64 * 8 < rank[2] / 4


# buffers, and the model after


def buffers_after_steps(place):
    job, sources = make_job(WithBatchNorm(num_rows=24), FSDP, world_size=place.world_size)
    with same_generators():
        setup = prepare(job.workload, job.config, job.recipe, place)
    step = TrainStep(job.workload, setup, job.config, job.recipe, place, gives_tuples=False)
    rows = sources["train"].read(job.train_plan().rank_indices(0, place.rank, place.world_size))
    step(RankBatch(0, rows, len(rows["y"])), num_rows=8, want_norm=False)
    found = {name: value.clone() for name, value in setup.parallel.module.named_buffers()}
    setup.parallel.close()
    return found, rows["x"]


def test_buffers_follow_rank_0_after_every_step(gloo):
    (first, x), (second, _) = gloo.run(2, buffers_after_steps)
    assert all(torch.equal(first[name], second[name]) for name in first)
    with same_generators():
        job, _ = make_job(WithBatchNorm(), {})
        model = prepare(job.workload, job.config, job.recipe, Place()).parallel.module
    model(torch.from_numpy(x).double())
    assert torch.allclose(first["1.running_mean"], dict(model.named_buffers())["1.running_mean"], rtol=1e-12)


def trained_then_closed(place, flags):
    job, sources = make_job(Deep(num_rows=8), {**FSDP, **flags}, world_size=place.world_size)
    with same_generators():
        setup = prepare(job.workload, job.config, job.recipe, place)
    step = TrainStep(job.workload, setup, job.config, job.recipe, place, gives_tuples=False)
    rows = sources["train"].read(job.train_plan().rank_indices(0, place.rank, place.world_size))
    step(RankBatch(0, rows, len(rows["tokens"])), num_rows=8, want_norm=False)
    weights = setup.parallel.full_state_dict()
    model = setup.parallel.module
    setup.parallel.close()
    hooks = [h for m in model.modules() for h in (m._forward_hooks, m._forward_pre_hooks, m._state_dict_pre_hooks, m._load_state_dict_pre_hooks)]  # fmt: skip
    has_hooks, names = any(hooks), {type(m).__name__ for m in model.modules()}
    marks = [key for m in model.modules() for key in vars(m) if "fsdp" in key or "compos" in key]
    sharded = {isinstance(p, DTensor) for p in model.parameters()}
    is_tied = model.head.weight is model.embedding.weight
    same = not weights or sharded == {True} or all(torch.equal(weights[n], v) for n, v in model.state_dict().items())
    again = sharded == {True} or isinstance(fully_shard(model), FSDPModule)
    return has_hooks, names, marks, sharded, is_tied, same, again


@pytest.mark.parametrize(("flags", "is_sharded"), [({}, False), ({"fsdp.build_gib": 1.0}, True)])
def test_after_close_the_model_is_the_users_again(gloo, flags, is_sharded):
    """Whole as it came, tied and ready to be sharded again; or still in shards, where it may be too large to be whole."""
    for hooks, names, marks, sharded, is_tied, same, again in gloo.run(2, trained_then_closed, flags):
        assert not hooks and marks == [] and is_tied and same and again
        assert names == {"Net", "Embedding", "ModuleList", "Block", "LayerNorm", "Linear"}
        assert sharded == {is_sharded}


def test_closing_twice_and_closing_a_plain_model_do_nothing():
    model = Net(11)
    before = dict(model.named_parameters())
    fsdp.unshard_for_good(model, keeps_shards=False)
    assert all(p is before[n] for n, p in model.named_parameters())


# checkpoints

RUN = {"checkpoint.every": "3 steps", **CLIPPED, "stop.after": "10 steps"}
LAYOUTS = {
    "ddp x 1": (1, {}), "ddp x 2": (2, {}), "fsdp x 2": (2, FSDP), "fsdp x 4": (4, FSDP), "HSDP x 4": (4, {**FSDP, "fsdp.replicas": 2}),
    "fsdp x 3, ZeRO-2": (3, {**FSDP, "fsdp.reshard_after_forward": False}), "zero1 x 2": (2, {"strategy.name": "zero1"}),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), [
    ("fsdp x 2", "ddp x 1"), ("fsdp x 2", "fsdp x 4"), ("fsdp x 2", "HSDP x 4"), ("HSDP x 4", "fsdp x 2"), ("ddp x 1", "fsdp x 4"),
    ("fsdp x 4", "zero1 x 2"), ("zero1 x 2", "HSDP x 4"),
])  # fmt: skip
def test_a_run_goes_on_under_another_layout_as_if_nothing_had_been(gloo, tmp_path, before, after):
    (first_size, first), (second_size, second) = LAYOUTS[before], LAYOUTS[after]
    gloo.run(first_size, run_in, {**RUN, **first}, str(tmp_path), 7)
    resumed = gloo.run(second_size, run_in, {**RUN, **second}, str(tmp_path), None)[0]
    assert [step.step for step in resumed.steps] == [7, 8, 9, 10]
    plain = train_in_plain_torch(Deep(), RUN)
    assert max(relative_differences(plain.losses[6:], resumed.losses)) < 1e-11
    assert largest_difference(plain.weights, resumed.weights) < 1e-11


def run_in(place, flags, folder, kill_at):
    flags = {**flags, "batch.global_size": 12, "batch.micro_size": None} if place.world_size == 3 else flags
    return train(place, Deep(), flags, folder=folder, kill_at=kill_at)


@pytest.mark.parametrize("options", [{}, {"fsdp.reshard_after_forward": False, "precision.dtype": "fp16"}])
def test_a_run_resumed_on_as_many_workers_is_bit_identical(gloo, tmp_path, options):
    flags = {**RUN, **FSDP, "precision.dtype": "fp32", "deterministic": True, **options}
    whole = gloo.run(2, run_in, flags, None, None)[0]
    gloo.run(2, run_in, flags, str(tmp_path), 7)
    resumed = gloo.run(2, run_in, flags, str(tmp_path), None)[0]
    assert resumed.losses == whole.losses[6:]
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)


def test_training_starts_from_the_weights_of_another_run(gloo, tmp_path):
    first = gloo.run(2, run_in, {**RUN, **FSDP, "stop.after": "3 steps"}, str(tmp_path), None)[0]
    flags = {"workload.weights": str(tmp_path), "optimizer.learning_rate": 1e-300, "stop.after": "1 steps", "seed": 5}
    for options in ({}, {"fsdp.build_gib": 1e-9}):
        started = gloo.run(4, run_in, {**flags, **FSDP, **options}, None, None)[0]
        assert largest_difference(first.weights, started.weights) < 1e-12
        assert {n: v.dtype for n, v in started.weights.items()} == {n: v.dtype for n, v in first.weights.items()}
