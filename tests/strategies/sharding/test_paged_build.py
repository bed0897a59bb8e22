"""Building a model in pages: the initial values of an ordinary build, in bounded memory."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from deep_net import Deep, Net
from small_runs import make_job, same_generators
from torch import nn

from scaleray.records.text.units import GIB
from scaleray.strategies.sharding.paged_build import PagedBuild
from scaleray.training.setup import model_setup
from scaleray.training.setup.model_setup import prepare
from scaleray.training.setup.rank_context import RankContext

FSDP = {"strategy.name": "fsdp"}


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


@pytest.mark.combination
def test_a_model_built_in_pages_has_the_initial_values_of_an_ordinary_build(gloo):
    whole = initial(RankContext(), {})
    assert whole[1] is None
    for world_size in (2, 3):
        for rank in gloo.run(world_size, initial, {"fsdp.build_gib": 60_000 / GIB, "batch.global_size": 12}):
            assert rank[0] == whole[0] and rank[3] == pytest.approx(whole[3], rel=1e-12)
            # the bound, and what drawing the largest layer has at the same time
            assert 0 < rank[1] < 60_000 + 2 * 128 * 64 * 8 < rank[2] / 4
