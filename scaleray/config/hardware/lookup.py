"""Catalogue of GPUs, links and networks with lookup by common names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from scaleray.common.parsing import near_words
from scaleray.config.hardware.hardware_kinds import Gpu, Link, Network
from scaleray.errors import UsageError


@dataclass(frozen=True)
class Catalogue:
    """GPUs, links and networks by name. `find_*` raise UsageError with the nearest names."""

    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    networks: tuple[Network, ...]
    sources: tuple[str, ...] = field(default=())

    def find_gpu(self, name: str) -> Gpu:
        """Return the GPU for `h100`, `A100-SXM4-80GB`, `NVIDIA H100 80GB HBM3` or `Tesla T4`."""
        return _find("GPU", name, self.gpus)

    def find_link(self, name: str) -> Link:
        """Return the link inside a node by name."""
        return _find("link", name, self.links)

    def find_network(self, name: str) -> Network:
        """Return a network by name or speed: `200G` per node, `8x400G` eight adapters per node, `100G-tcp`,
        `25G-efa`."""
        match = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)\s*g(?:b(?:it)?(?:/s)?)?(?:-([\w-]+))?", name.strip().lower())
        if match is None:
            return _find("network", name, self.networks)
        adapters, gbit, transport = int(match[1] or 1), float(match[2]), match[3]
        if transport is None:
            # assumption: up to 40 Gb/s is cloud Ethernet without RDMA
            transport = "rdma" if gbit > 40 else "tcp"
        return Network(
            name=name, gb_per_s=adapters * gbit / 8, transport=transport, num_adapters=adapters, source="given"
        )

    def with_entries(self, other: Catalogue) -> Catalogue:
        """Return this catalogue with `other`'s entries before its own, so that they win if names coincide."""
        return Catalogue(
            other.gpus + self.gpus,
            other.links + self.links,
            other.networks + self.networks,
            self.sources + other.sources,
        )


def _find(kind: str, name: str, entries: Iterable[Any]) -> Any:
    entries = tuple(entries)
    for entry in entries:
        if name.strip().lower() in (known.lower() for known in (entry.name, *entry_aliases(entry))):
            return entry
    wanted = _words(name)
    for entry in entries:
        if wanted in (_words(known) for known in (entry.name, *entry_aliases(entry))):
            return entry
    # a driver's name has more words than ours: NVIDIA H100 80GB HBM3. Choose the entry with the most words in common.
    fitting = [
        (len(_words(known)), entry)
        for entry in entries
        for known in (entry.name, *entry_aliases(entry))
        if len(known) > 1 and _words(known) <= wanted
    ]
    if fitting:
        return max(fitting, key=lambda pair: pair[0])[1]
    names = [entry.name for entry in entries]
    every = {known.lower(): entry.name for entry in entries for known in (entry.name, *entry_aliases(entry))}
    near = list(dict.fromkeys(every[key] for key in near_words(name.lower(), every, most=3, likeness=0.55)))
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(names)}"
    raise UsageError(
        kind, name, f"the catalogue has no such {kind}", f"{hint}. Define your own in a file: --hardware FILE"
    )


def entry_aliases(entry: Any) -> tuple[str, ...]:
    """Aliases of a catalogue entry; a link has none."""
    return tuple(getattr(entry, "aliases", ()))


_EMPTY_WORDS = {
    "nvidia", "amd", "tesla", "geforce", "quadro", "instinct", "gpu", "gpus", "dgx", "hbm2", "hbm2e", "hbm3", "hbm3e",
    "gb",
}  # fmt: skip


def _words(name: str) -> frozenset[str]:
    """Parts of a name, such as {a100, sxm, 80} for `A100-SXM4-80GB`, which do not depend on the spelling."""
    text = re.sub(r"(sxm|pcie)\d?", r" \1 ", name.lower())
    text = re.sub(r"(\d+)\s*gi?b\b", r"\1", text)
    return frozenset(word for word in re.split(r"[^a-z0-9.]+", text) if word and word not in _EMPTY_WORDS)
