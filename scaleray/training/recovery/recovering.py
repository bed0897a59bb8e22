"""A worker that trains in a succession of groups, as members are lost and replaced."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from scaleray.errors import PeerLostError
from scaleray.training.health.worker_errors import is_lost_peer, without_frames
from scaleray.training.recovery.member import Group, Member
from scaleray.training.state.live_state import LiveState

T = TypeVar("T")


def train_in_groups(member: Member, join: Callable[[Group], None], train: Callable[[Group, LiveState], T]) -> T | None:
    """Result of `train` in the group that completes the training, or None on a spare that was not needed.

    join: forms the process group. train: trains as a member of it, from the state in memory if there is one. Raises the
    errors of both, except those caused by the loss of another worker; PeerLostError if no group can follow."""
    live = LiveState(member.keep_random)
    while (group := member.next_group()) is not None:
        live.begin_group(group.random, group.lost, group.broken_at, grows=group.grows)
        try:
            join(group)
            result = train(group, live)
            if member.complete():
                return result
        except Exception as exc:
            # a member that is too late for a later group may be in time for the next one
            is_late = isinstance(exc, dist.DistStoreError) and group.epoch > 1
            if not (is_late or isinstance(exc, PeerLostError) or is_lost_peer(exc) or member.is_group_broken()):
                member.fail()
                raise
            member.lose_group()
            without_frames(exc)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        gc.collect()  # a group that is still known keeps its connections, and others would wait for this worker
    return None
