"""Copies of a run's state in the memory of several nodes, from which it continues when workers or a node are lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from scaleray.checkpoints.manifest import Manifest
from scaleray.checkpoints.memory_store import Generations, MemoryStore, homes
from scaleray.checkpoints.retention import Retention
from scaleray.checkpoints.saver import Saver
from scaleray.checkpoints.tensor_files import ALIGNMENT
from scaleray.common.printed import quantity
from scaleray.config.checkpoint import MemorySettings
from scaleray.records.run_record import CheckpointRecord, EvaluationRecord, EventRecord, StepRecord
from scaleray.records.text.units import MIB
from scaleray.training.setup.rank_context import RankContext

MESSAGES = "messages"
"""Key, among a checkpoint's facts, of rank 0's messages that the recorder may lack."""
KINDS = {kind.__name__: kind for kind in (StepRecord, EvaluationRecord)}
GENERATIONS = 2
"""Number of states in memory at the same time: the last complete one, and the one being written."""
LOST_PEER = "gloo/transport"
"""Part of the error message of a collective that failed because a worker was lost."""
FOR_MANIFESTS = 8 * 2**20
"""Bytes reserved for manifests, which include the messages."""


@dataclass(frozen=True)
class HolderPlace:
    """Address and secret of a holder. domain: failure domain of its node, such as a rack."""

    node: str
    domain: str
    host: str
    port: int
    token: str = field(repr=False)


@dataclass(frozen=True)
class Holders:
    """Holders of a run. own: the one on this worker's node. others: finds the existing ones, also on nodes without a
    worker; as it may wait for a lost node, `known` lists those of this worker's last group. recent: returns the last
    messages of this worker, some of which the recorder may lack. recorded: returns the last step in the run's record,
    if the record may be incomplete."""

    own: HolderPlace
    others: Callable[[], list[HolderPlace]] = list
    recent: Callable[[], list[Any]] = list
    recorded: Callable[[], int] | None = None
    known: list[HolderPlace] = field(default_factory=list)


class MemoryCopies:
    """Copies of one worker's run. Its methods are collective."""

    def __init__(
        self,
        settings: MemorySettings,
        place: RankContext,
        holders: Holders,
        *,
        strategy: str,
        every_steps: int,
        group: dist.ProcessGroup | None,
        emit: Callable[[CheckpointRecord | EventRecord], None],
    ) -> None:
        self.place, self.holders, self.every_steps, self.emit = place, holders, every_steps, emit
        gathered = place.gathered((holders.own, list(holders.known)))
        known = {own.node: own for own, _ in gathered}
        others = {each.node: each for _, theirs in gathered for each in theirs}
        if not others:
            others = {e.node: e for e in place.gathered(holders.others() if place.rank == 0 else [])[0]}
        here = homes({node: own.domain for node, own in known.items()}, settings.copies)[holders.own.node]
        stores = {
            each.node: MemoryStore.at(each.host, each.port, each.token, is_here=each.node == holders.own.node)
            for each in {**others, **known}.values()
        }
        holders.known[:] = {**others, **known}.values()
        nearest = [*here, *(node for node in stores if node not in here)]
        self.homes = [stores[node] for node in here]
        self.generations = Generations([stores[node] for node in nearest], [stores[node] for node in known])
        self.num_saved, self.is_on, self._is_reserved = 0, True, False
        self._reasons: set[str] = set()
        num_domains = len({each.domain for each in known.values()})
        if num_domains < settings.copies:
            what = "node" if settings.place == "node" else f"value of the label {settings.place}"
            self._say(
                f"checkpoint.memory.copies is {settings.copies}, but the workers are on {quantity(num_domains, what)}: "
                f"some copies are lost together"
            )
        self.saver = Saver(
            self.generations,
            group,
            stores=self.homes,
            repeats=True,
            world_size=place.world_size,
            strategy=strategy,
            is_asynchronous=True,
            full_every=1,
            retention=Retention(),
            emit=self._report,
            before_publishing=self._facts,
        )

    def begin(self, kept_step: int | None) -> None:
        """Remove all states except that of `kept_step`, from which the run continues. Collective."""
        if self.place.rank == 0:
            Generations(self.generations.stores).prune(Retention(), newest=kept_step)
        self._is_reserved = False

    def has_room(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the holders have enough memory for a state with these tensors. They are asked once, when the size is
        known, since an optimizer has no state before its first step. Collective. If there is too little memory, an
        event reports it and no copies are made."""
        if self._is_reserved:
            return True
        common = set(tensors).intersection(*self.place.gathered(list(tensors)))
        num_bytes = FOR_MANIFESTS + GENERATIONS * share_bytes(tensors, common, self.place.world_size)
        short = None
        for store in self.homes:
            try:
                free = store.reserve(f"rank-{self.place.rank}", num_bytes)
            except OSError as exc:
                short = str(exc)
            else:
                if free is not None:
                    needed = f"a worker needs {num_bytes / MIB:,.0f} MiB"
                    short = f"{store.root} has {free / MIB:,.0f} MiB free, and {needed}"
        found = [text for text in self.place.gathered(short) if text]
        if found:
            self._say(f"checkpoint.memory: {found[0]}; the run continues without copies in memory")
        self._is_reserved = self.is_on = not found
        return self.is_on

    def is_due(self, step: int) -> bool:
        """Whether copies are to be made after `step`, unless a worker is still making those of an earlier step."""
        return self.is_on and step % self.every_steps == 0

    @property
    def is_busy(self) -> bool:
        """Whether this worker is still making its last copies."""
        return self.saver.is_busy

    def found(self) -> list[Manifest]:
        """Manifests of the usable states in memory, newest first. Reports damaged states, and states that the run's
        record has not reached. On rank 0."""
        manifests, damages = self.generations.found()
        for damage in damages:
            self._say(f"{damage.file} is damaged ({damage.problem}) and is not used")
        if not manifests or self.holders.recorded is None:
            return manifests
        last = self.holders.recorded()
        known = {m.step for m in self.messages(manifests[0]) if isinstance(m, StepRecord)}
        recorded = [m for m in manifests if known.issuperset(range(max(last, 0) + 1, m.step + 1))]
        if len(recorded) < len(manifests):
            self._say(f"the state of step {manifests[0].step} in memory is not used: the record ends with step {last}")
        return recorded

    def messages(self, manifest: Manifest) -> tuple[Any, ...]:
        """Messages up to the step of a state, some of which the recorder may lack."""
        found = [KINDS[kind](**values) for kind, values in manifest.facts.get(MESSAGES, ())]
        return tuple(message for message in found if message.step <= manifest.step)

    def _facts(self) -> dict[str, Any]:
        kept = [message for message in self.holders.recent() if type(message).__name__ in KINDS]
        return {MESSAGES: [[type(message).__name__, as_json(message)] for message in kept]}

    def _report(self, message: CheckpointRecord | EventRecord) -> None:
        if isinstance(message, CheckpointRecord):
            self.num_saved += 1
        elif LOST_PEER in message.text:
            return  # the loss of that worker has its own report
        elif (reason := message.text.partition(": ")[2]) not in self._reasons:  # each of them once, not with each step
            self._reasons.add(reason)
            self.emit(dataclasses.replace(message, text=f"copies in memory: {message.text}"))

    def _say(self, text: str) -> None:
        if self.place.rank == 0:
            self.emit(EventRecord(text, kind="warning"))


def share_bytes(tensors: Mapping[str, torch.Tensor], common: Collection[str], world_size: int) -> int:
    """Upper bound for the bytes of a rank's file: the tensors that only it has, and its share of those that all ranks
    have. common: names of the tensors that all ranks have."""
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    whole = [local[name].nbytes for name in common if not isinstance(tensors[name], DTensor)]
    own = sum(tensor.nbytes for tensor in local.values()) - sum(whole)
    return own + sum(whole) // world_size + max(whole, default=0) + ALIGNMENT * len(tensors)


def as_json(message: StepRecord | EvaluationRecord) -> dict[str, Any]:
    """Fields of a message that the recorder reads."""
    return {name: value for name, value in dataclasses.asdict(message).items() if name != "signals"}
