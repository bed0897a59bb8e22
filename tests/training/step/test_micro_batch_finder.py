"""The micro-batch finder: tried sizes only, agreed by all ranks, and no trace in the training."""

import dataclasses
import gc
from unittest import mock

import pytest
import torch
from block_runs import Blocks, BlocksWithBatchNorm, BlocksWithDropout, TinyTransformer
from small_runs import largest_difference, make_job, relative_differences, train, train_alone, train_in_plain_torch
from small_transformer import SmallTransformer
from torch import nn
from torch.distributed.fsdp import fully_shard

from scaleray.data import RankBatch
from scaleray.errors import ConfigError, StepFailedError
from scaleray.records.text.units import GIB
from scaleray.strategies import STRATEGIES, Parallel, single
from scaleray.training.setup.model_setup import prepare
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.training_state import TrainState
from scaleray.training.step.micro_batch_finder import Trial, find, next_size

pytestmark = pytest.mark.combination  # a feature that few commits touch: its tests take turns

ADAMW = {"optimizer.name": "adamw", "optimizer.learning_rate": 0.01}


def search(place, workload, limit_bytes, flags=None, *, steps_before=0):
    """What is found for a limit, and whether the state of the training is the same before and after."""
    memory = {"memory.find_micro_size": True, "memory.limit_gib": limit_bytes / GIB, "memory.reserve": 0.0}
    flags = {**memory, **(flags or {})}
    job, sources = make_job(workload, {"batch.global_size": 24, **flags}, world_size=place.world_size)
    setup = prepare(job.workload, job.config, job.recipe, place)
    columns = sources["train"].read(job.train_plan().rank_indices(0, place.rank, place.world_size))
    batch = RankBatch(0, columns, len(next(iter(columns.values()))))
    state = TrainState(setup, place, job.workload, 0, lambda: {"training_time_s": 0.0}, lambda progress: None)
    if steps_before:
        for parameter in setup.parallel.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        setup.optimizer.step()
        setup.optimizer.zero_grad()
    before = state.digests()
    found = find(job.workload, setup, job.config, job.recipe, place, batch, gives_tuples=False)
    is_same = before == state.digests()
    has_gradients = any(p.grad is not None for p in setup.parallel.module.parameters())
    setup.close()
    return found, is_same and not has_gradients


def test_it_finds_the_largest_size_that_fits_and_tries_what_it_returns():
    everything, _ = search(RankContext(), Blocks(), 2**40)
    assert everything.micro_batch_size == 24 and len(everything.trials) == 3  # 1, 2, and at once the whole
    peaks = {size: search_peak(size) for size in (4, 6, 8, 12)}
    assert list(peaks.values()) == sorted(peaks.values())
    for size, peak in peaks.items():
        at, _ = search(RankContext(), Blocks(), peak)
        assert at.micro_batch_size == size and 0 <= at.headroom_share < 1e-6
        below, _ = search(RankContext(), Blocks(), peak - 1)
        assert below.micro_batch_size < size
        for found in (at, below):
            assert found.micro_batch_size in [t.micro_batch_size for t in found.trials if t.fits]


def search_peak(size):
    found, _ = search(RankContext(), Blocks(), 2**40, {"batch.micro_size": size})
    assert found.micro_batch_size == size == found.largest
    return found.trials[-1].peak_bytes


def test_less_memory_for_activations_allows_larger_micro_batches():
    limit = search_peak(6)
    plain, _ = search(RankContext(), Blocks(), limit)
    checkpointed, _ = search(RankContext(), Blocks(), limit, {"activations.checkpointing": "full"})
    assert plain.micro_batch_size == 6 < checkpointed.micro_batch_size


def test_the_reserve_stays_free():
    limit = 1.05 * search_peak(6)
    assert search(RankContext(), Blocks(), limit)[0].micro_batch_size == 6
    found, _ = search(RankContext(), Blocks(), limit, {"memory.reserve": 0.1})
    assert found.micro_batch_size < 6 and found.headroom_share >= 0.1
    assert any(not t.fits and t.peak_bytes <= limit for t in found.trials)


@pytest.mark.parametrize("workload", [BlocksWithBatchNorm, BlocksWithDropout, TinyTransformer])
@pytest.mark.parametrize("precision", ["fp64", "fp16"])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_the_training_state_is_afterwards_what_it_was(workload, precision, steps_before):
    flags = {**ADAMW, "precision.dtype": precision}
    least = 2 if workload is BlocksWithBatchNorm else 1
    found, is_same = search(RankContext(), OnlyPairs(workload(), least), 2**40, flags, steps_before=steps_before)
    assert is_same and found.micro_batch_size == 24


@pytest.fixture(autouse=True, scope="module")
def quick_collections():
    """A search collects garbage between its trials: not that of thousands of tests before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class OnlyPairs:
    """Keeps BatchNorm's single rows from failing: doubles a batch of one row."""

    def __init__(self, workload, least):
        self.workload, self.least = workload, least

    def __getattr__(self, name):
        if name in ("workload", "least"):
            raise AttributeError(name)
        return getattr(self.workload, name)

    def loss(self, model, batch):
        rows = len(next(iter(batch.values())))
        if rows < self.least:
            batch = {name: torch.cat([value, value]) for name, value in batch.items()}
        return self.workload.loss(model, batch)


def test_all_ranks_find_the_same_and_nothing_is_changed(gloo):
    outcomes = gloo.run(2, search, BlocksWithDropout(), 2**40, ADAMW)
    assert outcomes[0][0] == outcomes[1][0] and outcomes[0][0].micro_batch_size == 12
    assert all(is_same for _, is_same in outcomes)


class HungryOnRank1(Blocks):
    """One worker has no memory for more than 3 rows."""

    def loss(self, model, batch):
        if torch.distributed.get_rank() == 1 and len(batch["y"]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().loss(model, batch)


def test_a_rank_that_runs_out_of_memory_keeps_nobody_waiting(gloo):
    first, second = gloo.run(2, search, HungryOnRank1(), 2**40)
    assert first == second and first[1]
    assert first[0].micro_batch_size == 3
    assert [t.micro_batch_size for t in first[0].trials if not t.fits] == [12, 6, 4]


def sharded(model, mesh, config, workload):
    """The least that shards: torch's own fully_shard around blocks and model."""
    for block in workload.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    norm = lambda gradients: nn.utils.get_total_norm(gradients).full_tensor()
    return Parallel(model, model, gradient_divisor=mesh.size(), total_norm=norm, forward_is_collective=True)


def search_on_shards(place, flags):
    with mock.patch.dict(STRATEGIES, {"ddp": sharded}):
        return search(place, TinyTransformer(), 2**40, flags)


@pytest.mark.parametrize(
    "policy", ["full", *(pytest.param(p, marks=pytest.mark.combination) for p in ("none", "selective"))]
)
def test_it_searches_on_shards_whose_passes_communicate(gloo, policy):
    first, second = gloo.run(2, search_on_shards, {**ADAMW, "activations.checkpointing": policy})
    assert first == second and first[1]
    assert first[0].micro_batch_size == 12 and all(t.fits for t in first[0].trials)


def test_training_goes_on_with_what_was_found_and_equals_plain_torch(gloo):
    base = {"batch.global_size": 24, "stop.after": "3 steps", "evaluation.every": "2 steps"}
    flags = {**base, "memory.find_micro_size": True, "memory.limit_gib": search_peak(6) / GIB, "memory.reserve": 0.0}
    workload = Blocks(num_rows=48, num_val=5)
    plain = train_in_plain_torch(workload, base)
    alone = train_alone(workload, flags)
    assert alone.summary.memory["micro_batch"]["micro_batch_size"] == 6
    assert any(event.startswith("micro-batches of 6 rows, of at most 24") for event in alone.events)
    together = gloo.run(2, train, workload, flags)[0]
    for finished in (alone, together):
        assert max(relative_differences(plain.losses, finished.losses)) < 1e-9
        assert largest_difference(plain.weights, finished.weights) < 1e-9
        assert finished.evaluations


@pytest.mark.parametrize("degrees", [{"strategy.name": "fsdp"}, {"parallel.shard": 2, "parallel.expert": 2}])
def test_parameters_that_fsdp_holds_whole_after_the_first_look_are_searched_too(gloo, degrees):
    """A tied head belongs to no unit: its shard was put back into memory that FSDP had freed, which ended the process."""
    workload = SmallTransformer(num_experts=4 if "parallel.expert" in degrees else None)
    flags = {**ADAMW, "stop.after": "2 steps", "memory.find_micro_size": True, "memory.limit_gib": 4}
    together, alone = gloo.run(2, train, workload, {**flags, **degrees})[0], gloo.run(1, train, workload, flags)[0]
    assert max(relative_differences(alone.losses, together.losses)) <= 1e-9


def test_a_resumed_run_keeps_the_size_that_was_found(tmp_path):
    flags = {
        "batch.global_size": 24,
        "stop.after": "6 steps",
        "memory.find_micro_size": True,
        "checkpoint.every": "2 steps",
        "memory.limit_gib": search_peak(6) / GIB,
        "memory.reserve": 0.0,
    }
    whole = train_alone(BlocksWithDropout(num_rows=48), flags)
    train_alone(BlocksWithDropout(num_rows=48), flags, folder=tmp_path, kill_at=3)
    more = {**flags, "memory.limit_gib": 1.0}  # a search would find more
    resumed = train_alone(BlocksWithDropout(num_rows=48), more, folder=tmp_path)
    assert "micro_batch" not in resumed.summary.memory
    assert resumed.losses == whole.losses[-len(resumed.losses) :]


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"memory\.find_micro_size.*needs memory\.limit_gib"):
        make_job(Blocks(), {"memory.find_micro_size": True, "scale.gpus_per_worker": 0})
    with pytest.raises(ConfigError, match=r"memory\.find_micro_size.*static_graph"):
        make_job(Blocks(), {"memory.find_micro_size": True, "memory.limit_gib": 1, "strategy.static_graph": True})
    with pytest.raises(ConfigError, match=r"a micro-batch of 1 needs.*reserve"):
        train_alone(Blocks(), {"memory.find_micro_size": True, "memory.limit_gib": 1e-6})


@pytest.mark.parametrize("threshold", [1, 2, 3, 5, 12, 29, 60])
@pytest.mark.parametrize("curve", [lambda n: 10 + n, lambda n: 10 + n * n, lambda n: 10 + n**0.5, lambda n: 10.0])
def test_the_search_ends_with_a_size_that_was_tried_and_fits(threshold, curve):
    sizes, limit, trials = [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60], curve(threshold), []
    while (size := next_size(sizes, trials, limit)) is not None:
        assert size not in [t.micro_batch_size for t in trials]
        trials.append(Trial(size, curve(size) <= limit, curve(size)))
    best = max(t.micro_batch_size for t in trials if t.fits)
    assert curve(best) <= limit
    assert all(curve(size) > limit for size in sizes if size > best)  # nothing larger would
    if curve(2) - curve(1) in (0.0, 1.0):  # a straight line is followed at once
        assert len(trials) <= 4


# out of memory in the middle of training


class Hungry(BlocksWithBatchNorm):
    """From the third step on, more rows than `most` do not fit on one rank."""

    most, rank = 2, 0

    def __init__(self, where, **options):
        super().__init__(**options)
        self.where, self.calls = where, 0

    def loss(self, model, batch):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        total, count = super().loss(model, batch)
        self.calls += isinstance(total, torch.Tensor) and total.requires_grad
        if self.calls > 2 and len(batch["y"]) > self.most and rank == self.rank:
            if self.where == "forward":
                raise MemoryError("no memory for activations")
            total.register_hook(_fail)
        return total, count


def _fail(gradient):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


BACK_OFF = {"memory.on_out_of_memory": "halve", "batch.drop_last": True, "stop.after": "6 steps"}


def test_one_worker_halves_until_it_fits_and_trains_on():
    workload = lambda: NoStatistics("backward", num_rows=64)
    finished = train_alone(workload(), BACK_OFF)
    plain = train_in_plain_torch(Blocks(num_rows=64), BACK_OFF)
    assert max(relative_differences(plain.losses, finished.losses)) < 1e-9
    assert largest_difference(plain.weights, finished.weights) < 1e-9
    said = [event for event in finished.events if "out of memory" in event]
    assert [event[:52] for event in said] == [
        "out of memory with micro-batches of 8 rows: repeatin",
        "out of memory with micro-batches of 4 rows: repeatin",
    ]
    assert "step 3 with 4, 2 accumulated" in said[0] and "step 3 with 2, 4 accumulated" in said[1]


class NoStatistics(Hungry):
    def block(self):
        return Blocks.block(self)


class OnRank1(NoStatistics):
    rank = 1


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_all_workers_halve_together_before_gradients_are_communicated(gloo, where, deterministic):
    # two micro-batches of 4 rows a worker: memory runs out in the first, whose gradients stay local
    flags = {**BACK_OFF, "batch.global_size": 16, "batch.micro_size": 4, "deterministic": deterministic}
    first, second = gloo.run(2, train, OnRank1(where, num_rows=96), flags)
    plain = train_in_plain_torch(Blocks(num_rows=96), {**flags, "batch.micro_size": 8})
    assert max(relative_differences(plain.losses, first.losses)) < 1e-9
    assert largest_difference(plain.weights, first.weights) < 1e-9
    assert sum("repeating step 2 with 2, 4 accumulated" in event for event in first.events) == 1
    assert second.events == []


class HungryWithStatistics(Hungry):
    rank = 1


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_batch_norm_counts_a_repeated_step_once_and_ranks_go_on_together(gloo, where):
    flags = {**BACK_OFF, "batch.global_size": 16, "batch.micro_size": 4}
    first = gloo.run(2, train, HungryWithStatistics(where, num_rows=96), flags)[0]
    assert any("repeating step 2" in event for event in first.events)
    # one step of 2 micro-batches, then five of 4
    assert first.weights["0.norm.num_batches_tracked"] == 2 + 5 * 4


def test_out_of_memory_ends_the_run_with_advice_where_nothing_else_was_asked_for():
    with pytest.raises(StepFailedError, match=r"(?s)rank 0.*step 3.*--batch\.micro-size 4"):
        train_alone(NoStatistics("backward", num_rows=64), {"batch.drop_last": True})


class NeverFits(NoStatistics):
    most = 0


def test_single_rows_that_do_not_fit_end_the_run():
    with pytest.raises(StepFailedError, match="one row does not fit"):
        train_alone(NeverFits("forward", num_rows=64), BACK_OFF)


def test_a_pass_in_which_ranks_communicate_cannot_be_given_up_and_the_error_says_so(gloo):
    # 3 workers: a group of its own, as runs before may hold that of 2, whose sockets must close for rank 0 to hear of it
    outcomes = gloo.attempt(3, train, OnRank1("backward", num_rows=64), {**BACK_OFF, "batch.global_size": 24})
    texts = [outcome.text for outcome in outcomes]
    assert "Ranks cannot give up a pass in which they communicate" in texts[1]
    assert "another worker is gone" in texts[0]


@pytest.mark.parametrize("strategy", ["local_sgd", "gossip"])
def test_strategies_whose_ranks_step_apart_refuse_to_repeat_steps(strategy):
    with pytest.raises(ConfigError, match=r"memory\.on_out_of_memory.*cannot be repeated"):
        make_job(Blocks(), {**BACK_OFF, "strategy.name": strategy}, world_size=2)


def test_a_strategy_that_cannot_abandon_a_step_is_refused(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "single", lambda *args: dataclasses.replace(single.apply(*args), abandon=None))
    with pytest.raises(ConfigError, match="no rank can abandon it alone"):
        train_alone(Blocks(), BACK_OFF)
