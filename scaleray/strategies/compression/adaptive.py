"""Chooses the fastest way to send a bucket on this link, among those whose error is small enough.

As links and gradients change, costs are measured again: the link's cost per message and per byte and, for each
candidate, the time of its arithmetic and the part of this bucket's gradient that it loses. Ranks agree on the worst
numbers of all ranks, so they decide alike. Source: this rule is our own choice."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from scaleray.strategies.compression.codecs import Codec, Layout
from scaleray.strategies.traffic.collectives_log import GroupCollectives, Message

WHOLE = "none"
REPEATS = 3  # repeats of a measurement, of which the shortest counts
SMALLEST_PROBE_BYTES = 2**16  # a smaller probe shows latency only, not the cost of bytes


@dataclass(frozen=True)
class Link:
    """Cost of a collective: `latency_s` for each one, plus its bytes at `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Candidate:
    """One way to send a bucket. error: relative error, the largest on any rank. coding_s: seconds of arithmetic before
    and after sending."""

    name: str
    num_messages: int
    link_bytes: float
    error: float
    coding_s: float = 0.0

    def time_s(self, link: Link) -> float:
        """Predicted seconds from the moment a bucket is ready until its mean is available."""
        return self.coding_s + self.num_messages * link.latency_s + self.link_bytes / link.bytes_per_s


def choose(candidates: Sequence[Candidate], link: Link, *, max_error: float) -> Candidate | None:
    """Fastest candidate with an error of at most `max_error`; among equally fast ones, the most exact. None if there is
    none."""
    fit = [candidate for candidate in candidates if candidate.error <= max_error]  # NaN never fits
    return min(fit, key=lambda c: (c.time_s(link), c.error, c.name), default=None)


@dataclass(frozen=True)
class Review:
    """Result for one bucket. chosen: None if no gradient was finite."""

    chosen: Candidate | None
    link: Link
    is_finite: bool


def review(
    values: torch.Tensor,
    layout: Layout,
    codecs: Mapping[str, Codec],
    collectives: GroupCollectives,
    *,
    max_error: float,
) -> Review:
    """Measure the link and the candidates for a bucket, and choose one. Collective; every rank gets the same result.

    values: this rank's gradient plus its unsent residual, flat; not changed."""
    collectives.mean_(values.new_zeros(1))  # all ranks are here now: nobody's delay is taken for the link's
    latency_s = min(time_s(values, lambda: collectives.mean_(values.new_zeros(1))) for _ in range(REPEATS))
    probe = values.new_zeros(max(values.numel(), SMALLEST_PROBE_BYTES // values.element_size()))
    probe_s = min(time_s(values, lambda: collectives.mean_(probe)) for _ in range(REPEATS))
    norm = float(values.norm())
    measured = [latency_s, probe_s, 0.0 if math.isfinite(norm) else 1.0]
    for codec in codecs.values():
        started = time.perf_counter()
        lost = float((values - codec.seen(values, layout)).norm())
        measured += [lost / norm if norm > 0 else 0.0, time.perf_counter() - started]
    # a maximum over ranks needs an order, in which NaN has no place
    agreed = torch.tensor(measured, dtype=torch.float64, device=values.device).nan_to_num(nan=math.inf)
    latency_s, probe_s, is_spoilt, *rest = collectives.largest_(agreed).tolist()
    probe_bytes = Message("all_reduce", probe.numel() * probe.element_size()).link_bytes(collectives.world_size)
    # on a busy machine a probe may take no longer than nothing did
    link = Link(latency_s, probe_bytes / max(probe_s - latency_s, 0.1 * probe_s, 1e-9))
    candidates = []
    for name, error, coding_s in zip(codecs, rest[::2], rest[1::2], strict=True):
        messages = codecs[name].messages(layout, collectives.world_size)
        link_bytes = sum(message.link_bytes(collectives.world_size) for message in messages)
        candidates.append(Candidate(name, len(messages), link_bytes, error, 0.0 if name == WHOLE else coding_s))
    return Review(None if is_spoilt else choose(candidates, link, max_error=max_error), link, not is_spoilt)


def summary(found: Sequence[tuple[Layout, Review]]) -> str:
    """Text that lists each choice with its number of buckets and their share of the values."""
    total = sum(layout.size for layout, _ in found)
    words = []
    for name in sorted({review.chosen.name if review.chosen else "" for _, review in found}):
        sizes = [layout.size for layout, review in found if (review.chosen.name if review.chosen else "") == name]
        how = name.replace(WHOLE, "no compression") or "no compression (all allowed methods have too large errors)"
        words.append(f"{how} for {len(sizes)} of {len(found)} buckets ({sum(sizes) / total:.0%} of the values)")
    return ", ".join(words)


def time_s(values: torch.Tensor, work: Callable[[], object]) -> float:
    """Duration of a collective on this rank, in seconds."""
    started = time.perf_counter()
    work()
    if values.is_cuda:  # a collective has only been put in line; a review may wait for it
        torch.cuda.current_stream(values.device).synchronize()
    return time.perf_counter() - started
