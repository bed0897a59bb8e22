"""torch.compile: the same training, every graph break named, and never eager without a word."""

import os
from pathlib import Path

import pytest
import torch
from block_runs import Blocks, BlocksThatPrint, BlocksWithBatchNorm, Prints, TinyTransformer
from optional_programs import program
from small_runs import Classify, largest_difference, make_job, relative_differences, train, train_alone
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verified import judge

from scaleray.common.own_folder import COMPILED
from scaleray.errors import ConfigError, WorkloadError
from scaleray.training.setup import compilation
from scaleray.training.setup.model_setup import prepare
from scaleray.training.setup.rank_context import RankContext

pytestmark = pytest.mark.combination  # a feature that few commits touch: its tests take turns

ON_BLOCKS = {"compilation.what": "blocks", "compilation.backend": "aot_eager"}
ON_MODEL = {"compilation.what": "model", "compilation.backend": "aot_eager"}
EAGER = {"compilation.what": "blocks", "compilation.backend": "eager"}
PRINT_LINE = Prints.forward.__code__.co_firstlineno + 2


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was():
    yield
    assert not torch._dynamo.config.suppress_errors
    assert torch._functorch.config.activation_memory_budget == 1.0
    torch._dynamo.reset()


def same(left, right):
    assert max(relative_differences(left.losses, right.losses)) < 1e-9
    assert largest_difference(left.weights, right.weights) < 1e-9  # names too


@pytest.mark.each_value
@pytest.mark.parametrize("flags", [ON_BLOCKS, ON_MODEL], ids=["blocks", "model"])
@pytest.mark.parametrize(
    "more", [{}, {"activations.checkpointing": "full"}, {"activations.checkpointing": "selective"}]
)
def test_compiled_training_equals_eager_training(flags, more):
    recipe = {"batch.drop_last": True}  # one shape
    finished = train_alone(TinyTransformer(), {**recipe, **flags, **more})
    same(train_alone(TinyTransformer(), recipe), finished)
    report = finished.summary.compilation
    assert report["is_compiled"] and report["graph_breaks"] == [] and report["failures"] == []
    assert finished.events == []


def test_batch_norm_counts_each_batch_once_when_checkpointed_blocks_are_compiled():
    recipe = {"batch.drop_last": True}
    plain = train_alone(BlocksWithBatchNorm(), recipe)
    same(plain, train_alone(BlocksWithBatchNorm(), {**recipe, **ON_BLOCKS, "activations.checkpointing": "full"}))
    assert plain.weights["0.norm.num_batches_tracked"] == 6


def test_blocks_of_one_class_share_a_graph():
    flags = {"batch.drop_last": True}  # one shape
    blocks = train_alone(TinyTransformer(), {**ON_BLOCKS, **flags}).summary.compilation
    whole = train_alone(TinyTransformer(), {**ON_MODEL, **flags}).summary.compilation
    assert blocks["graphs"] == whole["graphs"] == 1
    assert 0 < blocks["operations"] < whole["operations"] / TinyTransformer.num_blocks
    assert blocks["compile_time_s"] > 0


def test_shapes_that_vary_compile_once_where_that_is_asked_for():
    graphs = {
        dynamic: train_alone(Blocks(), {**EAGER, "compilation.dynamic": dynamic}).summary.compilation["graphs"]
        for dynamic in (True, False)
    }
    assert graphs == {True: 2, False: 4}  # the first block's input needs no gradient; 8 rows, and the last 2


@pytest.mark.parametrize(
    "flags",
    [EAGER, pytest.param({**EAGER, "compilation.what": "model"}, marks=pytest.mark.combination)],
    ids=["blocks", "model"],
)
def test_verify_judges_ddp_around_compiled_parts_equal(gloo, flags):
    outcome = gloo.run(2, judge, TinyTransformer(), {**flags, "batch.drop_last": True}, 2)[0]
    assert outcome.verdict == "equal" and outcome.comparison.largest < 1e-9, outcome


ONE_SHAPE = {"batch.drop_last": True, "stop.after": "2 steps"}


@pytest.mark.parametrize("flags", [ON_BLOCKS, ON_MODEL], ids=["blocks", "model"])
def test_what_ddp_wraps_is_really_compiled_on_every_rank(gloo, flags):
    for finished in gloo.run(2, train, TinyTransformer(), {**flags, **ONE_SHAPE}):
        assert finished.summary.compilation["is_compiled"]
        assert finished.summary.compilation["graph_breaks"] == []
        assert flags is ON_MODEL or finished.events == []


def test_a_compiled_model_that_ddp_cannot_overlap_says_so(gloo):
    flags = {**ON_MODEL, **ONE_SHAPE, "activations.checkpointing": "full"}
    assert any(
        "synchronised after the backward pass" in e for e in gloo.run(2, train, TinyTransformer(), flags)[0].events
    )


def shard_compiled_blocks(place):
    """fully_shard around blocks as `prepare` compiles them: (graphs, largest difference of a gradient from eager)."""
    gradients = []
    for flags in ({}, {**ON_BLOCKS, "activations.checkpointing": "full"}):
        job, sources = make_job(TinyTransformer(), {**flags, "strategy.name": "single"})
        setup = prepare(job.workload, job.config, job.recipe, RankContext())
        model = setup.parallel.module
        graphs = 0
        if flags:
            mesh = init_device_mesh("cpu", (place.world_size,))
            for block in job.workload.blocks(model):
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        batch = {
            name: torch.from_numpy(v) for name, v in sources["train"].read(job.train_plan().global_indices(0)).items()
        }
        for _ in range(2):
            model.zero_grad()
            job.workload.loss(model, batch)[0].backward()
        graphs = counters["stats"]["unique_graphs"] if flags else 0
        gradients.append({n: p.grad.full_tensor() if flags else p.grad for n, p in model.named_parameters()})
        setup.close()
    return graphs, largest_difference(*gradients)


def test_fully_shard_around_compiled_blocks_is_compiled(gloo):
    for graphs, difference in gloo.run(2, shard_compiled_blocks):
        assert graphs == 1
        assert difference < 1e-12


def test_a_graph_break_is_counted_and_named_by_file_line_and_reason(capsys):
    finished = train_alone(BlocksThatPrint(), {**ON_BLOCKS, "batch.drop_last": True})
    capsys.readouterr()
    report = finished.summary.compilation
    assert report["is_compiled"]
    (broken,) = report["graph_breaks"]
    assert Path(broken["file"]).name == "block_runs.py" and broken["line"] == PRINT_LINE
    assert broken["reason"] and broken["times"] >= 1
    assert any(f"block_runs.py:{PRINT_LINE}" in event for event in finished.events)


class NeverCalled(Classify):
    """Its loss goes around the model's forward pass."""

    def loss(self, model, batch):
        x = batch["x"]
        for part in model:
            x = part(x)
        return torch.nn.functional.cross_entropy(x, batch["y"], reduction="sum"), len(x)


def test_a_run_that_asked_for_compile_and_got_none_says_so():
    finished = train_alone(NeverCalled(), ON_MODEL)
    assert not finished.summary.compilation["is_compiled"]
    assert any("asked to compile the model, but nothing was" in event for event in finished.events)
    with pytest.raises(ConfigError, match="no forward pass was called"):
        train_alone(NeverCalled(), {**ON_MODEL, "compilation.must_succeed": True})


def test_a_block_that_breaks_within_its_checkpoint_is_not_compiled_and_says_where(capsys):
    finished = train_alone(BlocksThatPrint(), {**ON_BLOCKS, "activations.checkpointing": "full"})
    capsys.readouterr()
    assert not finished.summary.compilation["is_compiled"]
    assert any("nothing was" in e and f"block_runs.py:{PRINT_LINE}" in e for e in finished.events)


def no_compiler(graph, inputs):
    raise RuntimeError("g++: command not found")


@pytest.fixture
def a_compiler_that_fails(monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(compilation.torch, "compile", lambda f, **o: compile_(f, **{**o, "backend": no_compiler}))


def test_training_goes_on_eagerly_where_compiling_fails_and_says_so(a_compiler_that_fails):
    finished = train_alone(TinyTransformer(), ON_BLOCKS)
    same(train_alone(TinyTransformer()), finished)
    report = finished.summary.compilation
    assert not report["is_compiled"] and "g++: command not found" in report["failures"][0]["reason"]
    assert any("training runs eagerly" in event and "g++" in event for event in finished.events)


def test_must_succeed_ends_the_run_where_compiling_fails(a_compiler_that_fails):
    with pytest.raises(ConfigError, match="command not found"):
        train_alone(TinyTransformer(), {**ON_BLOCKS, "compilation.must_succeed": True})


@pytest.mark.slow
@pytest.mark.skipif(program("g++") is None, reason="inductor needs a C++ compiler on the CPU")
def test_inductor_compiles_keeps_its_code_and_keeps_to_a_memory_budget(tmp_path, monkeypatch):
    monkeypatch.delenv(COMPILED, raising=False)
    flags = {
        "batch.drop_last": True,
        "stop.after": "2 steps",
        "compilation.what": "blocks",
        "compilation.must_succeed": True,
        "compilation.cache_dir": str(tmp_path),
        "activations.checkpointing": "budget",
        "activations.memory_budget": 0.0,
    }
    first, again = train_alone(TinyTransformer(), flags), train_alone(TinyTransformer(), flags)
    same(train_alone(TinyTransformer(), {"batch.drop_last": True, "stop.after": "2 steps"}), first)
    assert first.summary.compilation["is_compiled"] and any(tmp_path.iterdir())
    assert first.summary.compilation["cache_hits"] == 0 < again.summary.compilation["cache_hits"]
    assert again.losses == first.losses
    assert COMPILED not in os.environ


def saved_bytes(budget):
    """Bytes that the compiled model's forward pass keeps."""
    flags = {**ON_MODEL, "activations.checkpointing": "budget", "activations.memory_budget": budget}
    job, sources = make_job(TinyTransformer(), {**flags, "compilation.backend": "aot_eager"})
    setup = prepare(job.workload, job.config, job.recipe, RankContext())
    batch = {n: torch.from_numpy(v) for n, v in sources["train"].read(job.train_plan().global_indices(0)).items()}
    parameters = {p.untyped_storage().data_ptr() for p in setup.parallel.module.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        setup.parallel.model(batch["tokens"][:, :-1])
    setup.close()
    return sum(kept.values())


def test_a_smaller_budget_keeps_less():
    none, half, everything = saved_bytes(0.0), saved_bytes(0.5), saved_bytes(1.0)
    assert none < half < everything
    assert none < 0.3 * everything


def test_the_model_is_left_without_compiled_parts():
    job, _ = make_job(Blocks(), ON_MODEL)
    setup = prepare(job.workload, job.config, job.recipe, RankContext())
    assert "forward" in setup.parallel.module.__dict__
    setup.close()
    assert not any("forward" in part.__dict__ for part in setup.parallel.module.modules())


def test_what_cannot_be_is_refused():
    with pytest.raises(WorkloadError, match=r"compilation\.what blocks applies to the model's blocks"):
        train_alone(Classify(), ON_BLOCKS)
    with pytest.raises(ConfigError, match=r"compilation\.mode.*applies only to inductor"):
        make_job(Classify(), {**ON_MODEL, "compilation.mode": "max-autotune"})


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_do_not_accumulate(mode):
    """A graph's gradients lie in its own memory, which its next replay writes over."""
    flags = {"compilation.what": "model", "compilation.mode": mode, "scale.gpus_per_worker": 1}
    make_job(Classify(), {**flags, "batch.micro_size": 8})
    with pytest.raises(ConfigError, match="CUDA graphs overwrite the gradients"):
        make_job(Classify(), {**flags, "batch.micro_size": 4})
    make_job(Classify(), {**flags, "batch.micro_size": 4, "compilation.mode": "default"})
    make_job(Classify(), {**flags, "batch.micro_size": 4, "scale.gpus_per_worker": 0})
