"""What models cost, against parameter counts that their makers publish and formulas that papers print."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.errors import ConfigError, UsageError
from scaleray.planner.cost.compute import block_times
from scaleray.planner.cost.layout import Layout
from scaleray.planner.models.convolutions import resnet
from scaleray.planner.models.flop_count_as_model import from_workload, read_profile
from scaleray.planner.models.names import TRANSFORMERS, find_model, usual_shape
from scaleray.planner.models.transformers import TransformerShape, transformer
from scaleray.records.workload_profile import PartProfile, Product, WorkloadProfile

# from the model cards on the Hugging Face hub
PUBLISHED_PARAMS = {
    "llama-7b": 6_738_415_616, "llama-13b": 13_015_864_320, "llama-70b": 68_976_648_192, "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496, "llama-3-405b": 405_853_388_800, "qwen3-0.6b": 596_049_920, "llama-3-1b": 1_235_814_400,
    "llama-3-3b": 3_212_749_824, "gpt2": 124_439_808, "gpt2-xl": 1_557_611_200,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_PARAMS)
def test_parameters_are_those_that_the_model_card_gives(name):
    # norms and biases of some models differ from the general formula by a few vectors a layer
    assert find_model(name).num_params == pytest.approx(PUBLISHED_PARAMS[name], rel=2e-4)


@pytest.mark.parametrize(
    ("depth", "params", "macs"),
    [
        (18, 11_689_512, 1.81e9),
        (34, 21_797_672, 3.66e9),
        (50, 25_557_032, 4.09e9),
        (101, 44_549_160, 7.80e9),
        (152, 60_192_808, 11.5e9),
    ],
)
def test_resnets_have_torchvisions_parameters_and_multiply_adds(depth, params, macs):
    found = resnet(depth)
    assert found.num_params == params
    assert found.forward_flops / 2 == pytest.approx(macs, rel=0.01)


def test_small_filters_are_told_from_others_and_only_32_bit_gains_by_them():
    # a bottleneck of width w does 9 w^2 of its 17 w^2 in 3x3 filters, of which the first of a stage strides
    fifty, cifar = resnet(50), resnet(18, image=32, num_classes=10, is_small_stem=True)
    share = sum(b.winograd_flops * b.count for b in fifty.blocks) / fifty.forward_flops
    assert 0.35 < share < 9 / 17
    assert sum(b.winograd_flops * b.count for b in cifar.blocks) / cifar.forward_flops > 0.85
    v100 = CATALOGUE.find_gpu("v100")
    for block in fifty.blocks:
        assert 0 <= block.winograd_flops <= block.conv_flops
        without = replace(block, winograd_flops=0.0)
        for precision in ("fp16", "fp32"):
            times = [block_times(one, Layout(precision=precision), v100).forward_s for one in (block, without)]
            assert times[0] < times[1] if precision == "fp32" and block.winograd_flops else times[0] == times[1]


def test_the_cifar_variant_has_the_parameters_that_pollux_gives():
    assert resnet(18, image=32, num_classes=10, is_small_stem=True).num_params == 11_173_962


def test_a_depth_that_no_paper_has_is_refused():
    with pytest.raises(ConfigError, match="18, 34, 50"):
        resnet(42)


def test_flops_are_six_a_parameter_and_token_and_attention():
    shape = TransformerShape(
        layers=4, hidden=256, heads=4, vocab=1000, sequence=128, is_causal=False, tied_embeddings=True
    )
    found = transformer(shape)
    matrices = 4 * 12 * 256**2 + 1000 * 256
    assert found.train_flops == pytest.approx(128 * (6 * matrices + 12 * 4 * 256 * 128))


def test_a_causal_kernel_skips_half_of_the_scores_and_an_unfused_one_none():
    shape = {"layers": 1, "hidden": 64, "heads": 1, "vocab": 10, "sequence": 32}
    full = transformer(TransformerShape(**shape, is_causal=False)).blocks[1].attention_flops
    assert transformer(TransformerShape(**shape)).blocks[1].attention_flops == full / 2
    assert transformer(TransformerShape(**shape, fused_attention=False)).blocks[1].attention_flops == full


@pytest.mark.parametrize("field", ["layers", "hidden", "heads", "vocab", "sequence"])
def test_a_shape_without_layers_or_width_is_refused(field):
    with pytest.raises(ConfigError, match=field):
        TransformerShape(**{**{"layers": 1, "hidden": 8, "heads": 1, "vocab": 8, "sequence": 8}, field: 0})


def test_heads_must_divide_into_groups():
    with pytest.raises(ConfigError, match="kv_heads"):
        TransformerShape(layers=1, hidden=8, heads=4, kv_heads=3, vocab=8, sequence=8)


@settings(max_examples=20)
@given(st.floats(2e8, 5e11))
def test_a_size_alone_becomes_a_model_of_that_size(params):
    assert transformer(usual_shape(params, sequence=1024)).num_params == pytest.approx(params, rel=0.25)


def test_an_unknown_model_is_refused_with_the_nearest_names():
    with pytest.raises(UsageError, match="llama-70b"):
        find_model("lama-70b")
    assert find_model("Llama 3.1 8B").num_params == find_model("llama-3-8b").num_params
    assert find_model("gpt-13b").num_params == pytest.approx(13e9, rel=0.05)
    assert all(find_model(name).has_flops for name in TRANSFORMERS)


def counted():
    part = PartProfile(
        name="blocks.0",
        num_parameters=100,
        products=[Product(rows=8, inner=16, columns=32)],
        attention_flops=10.0,
        activation_bytes=400.0,
        output_bytes=64.0,
        traffic_bytes=800.0,
        num_operations=9,
    )
    ends = PartProfile(name="ends", num_parameters=50, output_bytes=64.0)
    return WorkloadProfile(
        num_parameters=400,
        num_trained_parameters=400,
        parameter_bytes=1600,
        precision="fp32",
        backward_flops=0.0,
        activation_bytes=1200.0,
        fixed_activation_bytes=0.0,
        count_per_sample=8.0,
        parts=[ends, part, part, part, ends],
    )


def test_a_counted_workload_keeps_its_parameters_and_flops(tmp_path):
    found = from_workload(counted(), name="mine")
    assert (found.num_params, [block.count for block in found.blocks]) == (400, [1, 3, 1])
    assert found.forward_flops == counted().forward_flops
    assert found.tokens_per_sample == 8
    path = tmp_path / "mine.json"
    path.write_text(counted().to_json())
    assert read_profile(path).num_params == 400
    path.write_text("{}")
    with pytest.raises(UsageError, match=r"mine\.json"):
        read_profile(path)
