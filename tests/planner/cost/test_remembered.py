"""What is remembered of other layouts changes no figure: whatever a layout was computed after, it comes out the same."""

from dataclasses import fields, replace

import pytest

from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.errors import ConfigError
from scaleray.planner.cost import block_pass, compute, memory, remembered, step_time
from scaleray.planner.cost.layout import Layout
from scaleray.planner.models.names import find_model

REMEMBERED = [
    one for room in (block_pass, compute, memory, step_time) for one in vars(room).values() if hasattr(one, "forget")
]
CLUSTER = parse_cluster("h100:8x8")
BASES = [
    Layout(data=4, tensor=4, pipeline=4, micro_batch=2, accumulation=8, sharding="zero1"),
    Layout(data=64, shard=8, micro_batch=2, accumulation=2, sharding="zero3", checkpointing="full"),
    Layout(data=32, shard=32, tensor=2, accumulation=4, sharding="zero3", checkpointing="alternate", compiled=True),
    Layout(data=8, pipeline=8, accumulation=16, schedule="interleaved", chunks=2, gradient_bytes=4),
    Layout(data=16, tensor=4, expert=8, accumulation=2, sharding="zero2", engine="deepspeed", sequence_parallel=True),
]
OTHERWISE = {
    "data": (2, 8, 16), "shard": (2, 4), "tensor": (2, 8), "pipeline": (1, 2, 16), "context": (2,), "expert": (2, 4),
    "micro_batch": (1, 4), "accumulation": (1, 32), "sharding": ("none", "zero1", "zero2", "zero3"),
    "checkpointing": ("none", "selective", "alternate", "full"), "sequence_parallel": (True, False),
    "keeps_gathered": (False,), "schedule": ("1f1b", "gpipe", "zero_bubble"), "even_stages": (True,),
    "filled_stages": (True,), "chunks": (1,), "precision": ("fp32", "fp8"), "is_mixed": (False,),
    "gradient_bytes": (2, 4), "optimizer_bytes": (4,), "compiled": (True, False), "overlaps_tensor": (True,),
    "overlaps_data": (False,), "overlaps_gather": (True,), "reduces_every_micro_batch": (True,),
    "accumulates_whole": (True,), "splits_logits": (False,), "gather_bits": (8,), "channels_last": (True,),
    "extra_s": (0.1,), "engine": ("torch", "deepspeed", "planned"), "offloads": (True,),
}  # fmt: skip


def figures(model, layout):
    return (
        memory.memory(model, layout),
        step_time.step_time(model, layout, CLUSTER),
        step_time.least_step_s(model, layout, CLUSTER),
    )


def forget():
    for cost in REMEMBERED:
        cost.forget()


def variations(base):
    """The base with one field otherwise, where that is a layout."""
    for name, values in OTHERWISE.items():
        for value in values:
            try:
                yield replace(base, **{name: value})
            except ConfigError:  # degrees that do not divide each other
                continue


def test_every_field_of_a_layout_is_tried():
    assert set(OTHERWISE) == {one.name for one in fields(Layout)}
    assert len(REMEMBERED) >= 6


@pytest.mark.parametrize("name", ["mixtral-8x7b", "llama-7b", "resnet-50"])
@pytest.mark.parametrize("base", BASES, ids=lambda base: base.strategy)
def test_figures_are_those_of_a_layout_alone_whichever_field_differs_from_the_one_before(name, base):
    model = find_model(name)
    for layout in variations(base):
        forget()
        alone = figures(model, layout)
        forget()
        figures(model, base)
        assert figures(model, layout) == alone, layout


def test_objects_are_told_apart_and_what_is_too_much_is_dropped(monkeypatch):
    calls = []

    @remembered.remembered("micro_batch")
    def cost(layout, other):
        calls.append((layout.micro_batch, other))
        return layout.micro_batch

    first, second = ["same"], ["same"]
    for layout in (Layout(micro_batch=2), Layout(micro_batch=2, data=4), Layout(micro_batch=4)):
        assert [cost(layout, first), cost(layout, second)] == [layout.micro_batch] * 2
    assert calls == [(2, first), (2, second), (4, first), (4, second)]
    monkeypatch.setattr(remembered, "MOST", 4)
    cost(Layout(micro_batch=8), first)
    cost(Layout(micro_batch=2), first)
    assert calls[4:] == [(8, first), (2, first)], "all was dropped when a fifth came"
