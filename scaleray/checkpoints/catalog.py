"""The checkpoints of one run: which exist, whether their bytes are right, what heals them, which may go."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scaleray.checkpoints.manifest import FILE_NAME, Chunk, Incomplete, Manifest, StoredFile, Tensor, folder_name
from scaleray.checkpoints.storage import Store
from scaleray.errors import CheckpointError

FOLDER = "checkpoints"  # of a run folder


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay. keep_every: also one every so many steps. best: a metric of the run, such as val/loss."""

    keep_last: int = 2
    keep_best: int = 0
    best: str | None = None
    is_higher_better: bool = False
    keep_every: int | None = None

    def kept(self, manifests: Iterable[Manifest]) -> set[int]:
        """Steps of those that stay."""
        ordered = sorted(manifests, key=lambda m: m.step)
        kept = {m.step for m in ordered[-self.keep_last :]}
        if self.best is not None and self.keep_best:
            sign = -1 if self.is_higher_better else 1
            measured = [m for m in ordered if _metric(m, self.best) is not None]
            measured.sort(key=lambda m: (sign * (_metric(m, self.best) or 0.0), m.step))
            kept |= {m.step for m in measured[: self.keep_best]}
        if self.keep_every is not None:
            kept |= {m.step for m in ordered if m.step % self.keep_every == 0}
        return kept


def _metric(manifest: Manifest, name: str | None) -> float | None:
    value = manifest.facts.get("metrics", {}).get(name)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


@dataclass(frozen=True)
class Damage:
    """A file that is not what its manifest says. healed_from: the copy that replaced it, if one did."""

    file: str
    problem: str
    healed_from: str | None = None


@dataclass(frozen=True)
class Catalog:
    """The checkpoints folder of a run, and its copy if there is one: `stores[0]` is the first, others hold the same."""

    stores: list[Store]

    @classmethod
    def of_run(cls, run_path: str, copy_path: str | None = None) -> Catalog:
        """The catalog of a run folder. copy_path: root of the copies; the run's name is added."""
        stores = [Store(run_path).child(FOLDER)]
        if copy_path:
            name = run_path.partition("?")[0].rstrip("/").rpartition("/")[2]
            stores.append(Store(copy_path).child(name).child(FOLDER))
        return cls(stores)

    def steps(self) -> list[int]:
        """Steps of all that look like checkpoints in any store, newest first."""
        folders = {name for store in self.stores for name in store.names() if name.startswith("step-")}
        return sorted((int(name[5:]) for name in folders if name[5:].isdigit()), reverse=True)

    def read(self, step: int) -> Manifest:
        """The manifest of a checkpoint from the first store that has a whole one. Raises Incomplete or CheckpointError."""
        problems = []
        for store in self.stores:
            name = f"{folder_name(step)}/{FILE_NAME}"
            try:
                return Manifest.from_json(store.read(name), where=store.path(name))
            except Incomplete as exc:
                problems.append(str(exc))
            except OSError:
                problems.append(f"{store.path(name)} does not exist: the checkpoint was not finished")
        raise Incomplete(problems[0])

    def complete(self) -> Iterator[Manifest]:
        """Manifests of all complete checkpoints, newest first; their files are not looked at."""
        for step in self.steps():
            try:
                yield self.read(step)
            except Incomplete:
                continue

    def newest(self) -> Manifest | None:
        """The newest complete checkpoint, or None."""
        return next(self.complete(), None)

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, which makes the checkpoint exist. The copy's comes first: it must never be behind."""
        text = manifest.to_json()
        for store in reversed(self.stores):
            store.write_text(f"{manifest.name}/{FILE_NAME}", text)

    def check(self, manifest: Manifest, files: Iterable[str] | None = None, *, heal: bool = True) -> list[Damage]:
        """Compare files (all by default) with their SHA-256 in every store; replace bad ones by a good copy if told to.

        Gives what was found. A damage that is not healed leaves the checkpoint unusable.
        """
        found = []
        for name in sorted(manifest.files) if files is None else files:
            expected = manifest.files[name]
            problems = {store: _problem(store, name, expected) for store in self.stores}
            good = next((store for store, problem in problems.items() if problem is None), None)
            for store, problem in problems.items():
                if problem is None:
                    continue
                if good is not None and heal:
                    store.copy_from(good, name)
                healed = good.path(name) if good is not None and heal else None
                found.append(Damage(store.path(name), problem, healed))
        return found

    def prune(self, retention: Retention) -> list[int]:
        """Remove what the policy does not keep, and what older unfinished checkpoints left; gives the steps removed.

        Files that a kept checkpoint still names stay, whatever folder they are in.
        """
        manifests = {m.step: m for m in self.complete()}
        if not manifests:
            return []
        kept = retention.kept(manifests.values())
        newest = max(manifests)
        removed = [step for step in self.steps() if step not in kept and step <= newest]
        needed = {name for step in kept for name in manifests[step].files}
        for store in self.stores:
            for step in removed:
                folder = folder_name(step)
                names = store.names(folder, recursive=True)
                # the manifest first: a checkpoint must not exist without its files
                for name in sorted(names, key=lambda n: not n.endswith(FILE_NAME)):
                    if name not in needed:
                        store.delete(name)
                if not any(name in needed for name in names):
                    store.delete_folder(folder)
        return [step for step in removed if step in manifests]

    def rebuild(self, manifest: Manifest) -> Manifest:
        """Write an incremental checkpoint anew as a full one, which depends on no other. Raises Incomplete."""
        from scaleray.checkpoints.sharded import ALIGNMENT

        file = f"{manifest.name}/full.bin"
        tensors: dict[str, Tensor] = {}
        order: list[Chunk] = []
        position = 0
        for name, tensor in manifest.tensors.items():
            chunks = []
            for chunk in tensor.chunks:
                chunks.append(dataclasses.replace(chunk, file=file, start=position))
                order.append(chunk)
                position += chunk.length + -chunk.length % ALIGNMENT
            tensors[name] = dataclasses.replace(tensor, chunks=tuple(chunks))
        stored = StoredFile("", 0)
        for store in self.stores:
            stored = StoredFile(*store.write(file, _contents(self.stores, order)))
        full = dataclasses.replace(
            manifest, tensors=tensors, files={file: stored}, chain=0, bytes_written=stored.num_bytes
        )
        self.publish(full)
        return full


def _contents(stores: list[Store], chunks: list[Chunk]) -> Iterator[bytes]:
    import torch

    from scaleray.checkpoints.sharded import ALIGNMENT, read_chunk

    for chunk in chunks:
        plain = dataclasses.replace(chunk, sizes=(chunk.length,))
        yield read_chunk(stores, plain, torch.uint8).numpy().tobytes()
        if padding := -chunk.length % ALIGNMENT:
            yield bytes(padding)


def _problem(store: Store, name: str, expected: StoredFile) -> str | None:
    try:
        sha256, length = store.digest(name)
    except OSError:
        return "missing"
    if length != expected.num_bytes:
        return f"{length} bytes instead of {expected.num_bytes}"
    return None if sha256 == expected.sha256 else "its SHA-256 is another"


def require(catalog: Catalog, step: int | None, *, where: str) -> Manifest:
    """The checkpoint at `step`, or the newest complete one. Raises CheckpointError with what there is instead."""
    steps = catalog.steps()
    if step is None:
        newest = catalog.newest()
        if newest is not None:
            return newest
        found = f"{len(steps)} unfinished" if steps else "empty"
        raise CheckpointError(
            f"the checkpoints folder of {where}",
            found,
            "it holds no complete checkpoint",
            "a checkpoint is complete when its manifest.json is there",
        )
    try:
        return catalog.read(step)
    except Incomplete as exc:
        complete = ", ".join(str(m.step) for m in catalog.complete()) or "none"
        raise CheckpointError(
            f"the checkpoint of step {step}",
            "incomplete" if step in steps else "missing",
            str(exc),
            f"complete ones: {complete}",
        ) from exc
