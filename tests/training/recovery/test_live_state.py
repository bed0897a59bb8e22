"""A state in memory that is not whole is never passed on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from scaleray.checkpoints.manifest import Manifest, Tensor
from scaleray.training.state import live_state
from scaleray.training.state.live_state import LiveState


class Place:
    """Rank 1 of two, with the positions that both have; `given` is what this rank said of itself."""

    rank, world_size = 1, 2

    def __init__(self, *positions):
        self.positions, self.given = list(positions), []

    def gathered(self, value):
        self.given.append(value[1])
        return [(2, position) for position in self.positions]


def kept(step):
    about = {"model.weight": Tensor("float32", (2,), ())}
    return live_state._Kept(Manifest(step, 2, "ddp", 0.0, about, {}, {}), (), True)


@pytest.fixture
def live():
    found = LiveState(lambda rank, step, state: None)
    found.kept, found._tensors = kept(3), {"model.weight": torch.zeros(2)}
    return found


def test_a_state_whose_update_has_begun_is_not_whole(live):
    live.before_update(torch.nn.Linear(1, 1))
    place = Place(None, None)
    assert live.share(place) is None and live.share(place) is None
    assert place.given == [None, None]


def test_a_state_that_was_received_by_half_is_not_whole(live, monkeypatch):
    def lost(*arguments, **named):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, src: box.__setitem__(0, kept(4)))
    monkeypatch.setattr(dist, "recv", lost)
    place = Place((4, True), (3, True))
    with pytest.raises(RuntimeError):
        live.share(place)
    place.positions = [None, None]
    assert live.share(place) is None
    assert place.given == [(3, True), None]
