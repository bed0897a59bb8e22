"""Whether a layout fits a card: against runs that did and one that did not, and laws of the three verdicts."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.memory import HEADROOM, memory, memory_interval, verdict
from scaleray.planner.models.names import find_model
from scaleray.planner.models.transformers import TransformerShape, transformer
from scaleray.records.text.units import GIB

A100 = CATALOGUE.find_gpu("a100-80")
ORDER = ("fits", "may not fit", "does not fit")


def bloom(layers, hidden, heads):
    return transformer(
        TransformerShape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            vocab=250000,
            sequence=2048,
            fused_attention=False,
            has_dropout=True,
            tied_embeddings=True,
            learned_positions=True,
            logit_bytes=6,
        )
    )


# BigScience's search for the layout of BLOOM, chronicles-prequel.md: the first ran out of memory, the others used 69, 75 and 29 GB
@pytest.mark.parametrize(
    ("model", "pipeline", "data", "micro_batch", "expected"),
    [
        (bloom(80, 14400, 100), 10, 4, 8, {"does not fit"}),
        (bloom(72, 14336, 64), 12, 4, 8, {"fits", "may not fit"}),
        (bloom(78, 14400, 100), 6, 8, 8, {"may not fit", "does not fit"}),
        (bloom(72, 14336, 64), 12, 4, 1, {"fits"}),
    ],
)
def test_blooms_layouts_are_judged_as_they_went(model, pipeline, data, micro_batch, expected):
    layout = Layout(
        data=data,
        tensor=8,
        pipeline=pipeline,
        micro_batch=micro_batch,
        accumulation=2048 // data // micro_batch,
        sharding="zero1",
        checkpointing="full",
        precision="fp16",
        even_stages=True,
        keeps_gathered=False,
        engine="deepspeed",
    )
    assert verdict(memory(model, layout), A100) in expected


@pytest.mark.combination
@settings(max_examples=40)
@given(
    st.sampled_from(["gpt2-xl", "llama-7b", "resnet-50"]),
    st.sampled_from([1, 8, 64]),
    st.integers(0, 8),
    st.floats(4, 300),
)
def test_more_memory_never_makes_it_fit_less(name, data, doublings, card_gib):
    needed = memory(find_model(name), Layout(data=data, sharding="zero3", shard=data, micro_batch=2**doublings))
    small, large = (replace(A100, memory_gib=size) for size in (card_gib, 1.3 * card_gib))
    assert ORDER.index(verdict(needed, large)) <= ORDER.index(verdict(needed, small))
    said = memory_interval(needed)
    assert said.low < said.value == needed.device_bytes < said.high
    if verdict(needed, small) == "fits":
        assert said.high <= card_gib * GIB
    if verdict(needed, small) != "does not fit":
        assert needed.device_bytes <= (1 - HEADROOM) * card_gib * GIB


def test_the_three_verdicts_follow_each_other_as_the_card_shrinks():
    needed = memory(find_model("llama-7b"), Layout(data=8, shard=8, sharding="zero3"))
    sizes = [needed.device_bytes / GIB * factor for factor in (1.3, 1.1, 1.04)]
    assert tuple(verdict(needed, replace(A100, memory_gib=size)) for size in sizes) == ORDER
