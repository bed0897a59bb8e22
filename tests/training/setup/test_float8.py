"""float8: which layers compute in it, that they round as it does, and that everything else stays as it was.

Products are emulated, as no machine of CI has them: operands are rounded to float8 and multiplied in float32.
"""

import contextlib
import sys

import pytest
import torch
from small_runs import Classify, largest_difference, make_job, relative_differences, same_generators, train, train_alone
from small_transformer import SmallTransformer
from torch import nn

from scaleray.config.precision import PrecisionSettings
from scaleray.errors import ConfigError, WorkloadError
from scaleray.training.setup.float8 import check_device, convert
from scaleray.training.setup.model_setup import prepare
from scaleray.training.setup.rank_context import RankContext
from scaleray.verification.variants import short_job

pytestmark = pytest.mark.combination  # a feature that few commits touch: its tests take turns

CPU = torch.device("cpu")
EMULATED = {"precision.dtype": "bf16", "precision.float8": "tensorwise", "precision.emulate_float8": True}
LARGEST_E4M3 = 448.0


def settings(**more):
    return PrecisionSettings(**{"dtype": "bf16", "float8": "tensorwise", "emulate_float8": True, **more})


def rounded(tensor):
    """To float8 and back, with one scale for the tensor."""
    scale = LARGEST_E4M3 / tensor.abs().max().float()
    return ((tensor.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(tensor.dtype)


class Wide(Classify):
    """Layers of sizes that float8 has, and one that it has not."""

    def build_model(self):
        return nn.Sequential(
            nn.Linear(6, 16), nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 16), nn.Linear(16, 3)
        )


@pytest.fixture
def converted():
    """A model in float8, its notes, and what takes it back."""
    undo = contextlib.ExitStack()
    with same_generators():
        model = Wide().build_model()
    notes = convert(model, CPU, settings(), Wide(), undo)
    yield model, notes, undo
    undo.close()


def test_layers_become_float8_in_place_and_plain_again(converted):
    model, notes, undo = converted
    in_float8 = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and type(m) is not nn.Linear]
    assert in_float8 == ["1", "3"]
    assert notes == [
        "float8 (tensorwise, emulated in float32: for checks, not for speed): 2 linear layers compute in it; "
        "not 0 (16 x 6, not multiples of 16), 4 (the last layer)"
    ]
    attributes = set(nn.Linear(1, 1).__dict__)
    undo.close()
    assert {type(m) for m in model} == {nn.Linear, nn.Tanh}
    assert all(set(m.__dict__) == attributes for m in model if isinstance(m, nn.Linear))


def test_parameters_names_and_hooks_stay():
    undo, seen = contextlib.ExitStack(), []
    with same_generators():
        model = Wide().build_model()
    before = dict(model.named_parameters())
    model[1].register_forward_hook(lambda *args: seen.append(1))
    with undo:
        convert(model, CPU, settings(), Wide(), undo)
        assert all(p is before[name] for name, p in model.named_parameters())
        assert list(dict(model.named_parameters())) == list(before)
        model(torch.ones(2, 6))
    assert seen == [1]


def test_a_product_is_that_of_rounded_operands(converted):
    model, _, _ = converted
    with same_generators():
        torch.manual_seed(1)
        x = torch.randn(5, 16, requires_grad=True)
    layer = model[1]
    expected = rounded(x.detach()) @ rounded(layer.weight.detach()).t()
    found = layer(x)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-5, atol=1e-6)
    plain = x.detach() @ layer.weight.detach().t()
    assert (found - plain).abs().max() > 1e-3  # it does round
    found.sum().backward()  # of ones, which e5m2 represents exactly
    torch.testing.assert_close(x.grad, rounded(layer.weight.detach()).sum(0).expand(5, 16), rtol=1e-5, atol=1e-6)
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("float8", ["tensorwise", "rowwise"])
def test_a_training_in_float8_stays_near_bf16(float8):
    """e4m3 keeps 4 bits of a number: losses of the first steps differ by a few percent at most, and do differ."""
    workload = SmallTransformer(num_val=4)
    half = train_alone(workload, {"precision.dtype": "bf16"})
    narrow = train_alone(workload, {**EMULATED, "precision.float8": float8})
    assert narrow.losses != half.losses
    assert narrow.losses == pytest.approx(half.losses, rel=0.03)
    assert narrow.weights.keys() == half.weights.keys()
    assert {v.dtype for v in narrow.weights.values()} == {torch.float32}
    assert any("28 linear layers compute in it; not head (outside the blocks)" in text for text in narrow.events)
    assert torch.get_autocast_dtype("cuda") == torch.float16  # torch's own default again


@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(s, marks=pytest.mark.combination) for s in ("ddp", "zero1", "pipeline"))]
)
def test_several_workers_round_as_one_does(gloo, strategy):
    # micro-batches of the same rows: a scale is found for each, and powers of two between losses change no rounding
    flags = {
        **EMULATED,
        "batch.micro_size": 4,
        "stop.after": "6 steps",
        "batch.drop_last": True,
        "optimizer.clip_norm": 0.5,
        "fsdp.parameter_dtype": "fp32",  # its default under bf16 rounds weights to bf16 before float8 rounds them
    }
    alone = train_alone(SmallTransformer(num_rows=48), flags)
    several = gloo.run(2, train, SmallTransformer(num_rows=48), {**flags, "strategy.name": strategy})[0]
    assert max(relative_differences(alone.losses, several.losses)) < 1e-3
    assert largest_difference(alone.weights, several.weights) < 5e-2
    bf16 = train_alone(
        SmallTransformer(num_rows=48), {**flags, "precision.float8": "none", "precision.emulate_float8": False}
    )
    ours, theirs = (max(relative_differences(alone.losses, x.losses)) for x in (several, bf16))
    assert ours < 0.3 * theirs  # nearer to one worker in float8 than that is to bf16


def test_float8_goes_with_checkpointing_and_compilation():
    plain = train_alone(SmallTransformer(), EMULATED)
    flags = {
        **EMULATED,
        "activations.checkpointing": "full",
        "compilation.what": "blocks",
        "compilation.backend": "eager",
    }
    both = train_alone(SmallTransformer(), flags)
    assert both.losses == pytest.approx(plain.losses, rel=1e-6)
    assert both.summary.compilation["is_compiled"] and both.summary.compilation["graph_breaks"] == []


def test_the_users_model_is_plain_after_the_run():
    job, _ = make_job(Wide(), EMULATED)
    built = []
    build = job.workload.build_model
    job.workload.build_model = lambda: built.append(build()) or built[0]
    with same_generators():
        setup = prepare(job.workload, job.config, job.recipe, RankContext())
    assert type(built[0][1]) is not nn.Linear
    setup.close()
    assert type(built[0][1]) is nn.Linear


def test_a_check_in_float64_leaves_float8_out():
    job, _ = make_job(SmallTransformer(), EMULATED)
    checked = short_job(job, steps=2, precision="fp64").config.precision
    assert (checked.dtype, checked.float8) == ("fp64", "none")
    assert short_job(job, steps=2).config.precision == job.config.precision


# what is refused


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"precision.dtype": "fp32"}, "its products are bf16"),
        ({"precision.emulate_float8": False}, "the workers have no GPU"),
        ({"precision.float8": "rowwise_with_gw_hp"}, "cannot emulate rowwise_with_gw_hp"),
        ({"strategy.name": "tensor", "scale.workers": 2}, "does not support float8"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(flags, says):
    with pytest.raises(ConfigError, match=says):
        make_job(Wide(), {**EMULATED, **flags})


@pytest.mark.parametrize(
    ("workload", "flags", "says"),
    [
        (Classify(), {}, "8 x 6, not multiples of 16"),
        (Wide(), {"precision.float8_leave_out": ["9"]}, "no linear layer has this name"),
        (Wide(), {"precision.float8_leave_out": ["1", "3"]}, "left out by float8_leave_out"),
    ],
)
def test_a_model_without_such_a_layer_is_refused_with_the_reason(workload, flags, says):
    with pytest.raises(WorkloadError, match=says):
        train_alone(workload, {**EMULATED, **flags})


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"scaleray\[float8\]"):
        train_alone(Wide(), EMULATED)


@pytest.mark.parametrize(
    ("capability", "float8", "says"),
    [((8, 0), "tensorwise", "which computes in bf16"), ((8, 9), "rowwise", "use tensorwise")],
)
def test_a_device_without_float8_is_refused(monkeypatch, capability, float8, says):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    with pytest.raises(ConfigError, match=says):
        check_device(torch.device("cuda"), settings(float8=float8, emulate_float8=False))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_device(torch.device("cuda"), settings(float8=float8, emulate_float8=False))
    with pytest.raises(ConfigError, match="a cpu device has no float8"):
        check_device(CPU, settings(float8=float8, emulate_float8=False))
