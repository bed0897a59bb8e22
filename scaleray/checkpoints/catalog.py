"""Checkpoints of one run: listing, verification, repair and removal."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from scaleray.checkpoints.damage import Damage, damage_of, mended, problem_of
from scaleray.checkpoints.manifest import FILE_NAME, Chunk, Damaged, Incomplete, Manifest, Tensor, folder_name, step_of
from scaleray.checkpoints.retention import Retention
from scaleray.checkpoints.storage import Store
from scaleray.checkpoints.weight_sums import check_manifest
from scaleray.common.progress import Stage, stage
from scaleray.errors import CheckpointError
from scaleray.records.text.units import MIB

FOLDER = "checkpoints"  # name of the folder in a run folder


@dataclass(frozen=True)
class Pruned:
    """Result of `prune`: steps of the complete checkpoints that were, or would be, removed, and bytes of all files in
    the first store."""

    steps: list[int]
    num_bytes: int


@dataclass(frozen=True)
class Catalog:
    """Checkpoints folder of a run, and its copy if there is one. `stores[0]` is the primary one; other stores hold the
    same files."""

    stores: list[Store]

    @classmethod
    def of_run(cls, run_path: str, copy_path: str | None = None) -> Catalog:
        """Return the catalog of a run folder. copy_path: root of the copies; the run's name is appended."""
        run = Store(run_path)
        stores = [run.child(FOLDER)]
        if copy_path:
            stores.append(Store(copy_path).child(run.name).child(FOLDER))
        return cls(stores)

    @classmethod
    def at(cls, where: str, copy_path: str | None = None) -> tuple[Catalog, int | None]:
        """Return the catalog at a path, and the step if the path is that of one checkpoint. The path may be a run
        folder, the checkpoints folder in it, or a step's folder. copy_path: as in `of_run`."""
        store = Store(where.rstrip("/") if "://" not in where else where)
        step = step_of(store.name)
        if step is not None:
            store = store.parent
        if step is None and store.name != FOLDER:
            return cls.of_run(store.root, copy_path), None
        if copy_path and store.name == FOLDER:
            return cls.of_run(store.parent.root, copy_path), step
        return cls([store]), step

    def steps(self) -> list[int]:
        """Steps of all folders that are named like checkpoints in any store, newest first. Raises OSError if no store
        can be read."""
        found: set[int] = set()
        failed: list[OSError] = []
        for store in self.stores:
            try:
                found |= {step for name in store.names() if (step := step_of(name)) is not None}
            except OSError as exc:
                failed.append(exc)
        if len(failed) == len(self.stores):
            raise failed[0]
        return sorted(found, reverse=True)

    def read(self, step: int) -> Manifest:
        """Return the manifest of a checkpoint from the first store that has a complete one. Raises Incomplete if there
        is none, Damaged if only an unusable one is left, CheckpointError for a newer format, and OSError if a store
        that may have one cannot be read, since this must not make a run use an older checkpoint."""
        problems: list[Incomplete] = []
        unread: OSError | None = None
        for store in self.stores:
            try:
                manifest = _read(store, step)
            except Incomplete as exc:
                problems.append(exc)
            except OSError as exc:
                unread = exc
            else:
                return manifest
        if unread is not None:
            raise unread
        raise next((problem for problem in problems if isinstance(problem, Damaged)), problems[0])

    def complete(self) -> Iterator[Manifest]:
        """Yield the manifests of all complete checkpoints, newest first, without checking their files."""
        for step in self.steps():
            try:
                yield self.read(step)
            except Incomplete:
                continue

    def newest(self) -> Manifest | None:
        """Return the newest complete checkpoint, or None."""
        return next(self.complete(), None)

    def publish(self, manifest: Manifest) -> list[str]:
        """Write the manifest, which makes the checkpoint valid, and return errors of single stores. The copy's manifest
        is written first, since the copy must never be behind. Raises Incomplete if a listed file is missing, for
        example one of an older checkpoint that was removed by another process, and OSError if no store accepts the
        manifest."""
        if missing := set(manifest.files).difference(*(_present(store, manifest) for store in self.stores)):
            raise Incomplete(f"{self.stores[0].path(min(missing))} is missing")
        text = manifest.to_json()
        failed: list[OSError] = []
        for store in reversed(self.stores):
            try:
                store.write_text(f"{manifest.name}/{FILE_NAME}", text)
            except OSError as exc:
                failed.append(exc)
        if len(failed) == len(self.stores):
            raise failed[-1]
        return [str(exc) for exc in failed]

    def check(self, manifest: Manifest, files: Iterable[str] | None = None, *, heal: bool = True) -> list[Damage]:
        """Compare files (by default all) with their SHA-256 in every store. With `heal`, replace bad files by a good
        copy.

        Returns the damage found. Damage for which `is_lost` is true makes the checkpoint unusable. By default the
        manifests are compared as well."""
        found, names = [], sorted(manifest.files) if files is None else list(files)
        size = sum(manifest.files[name].num_bytes for name in names) * len(self.stores) / MIB
        with stage(f"reading step {manifest.step}", total=size, unit="MiB") as reading:
            for name in names:
                expected = manifest.files[name]
                problems = {}
                for store in self.stores:
                    problems[store] = problem_of(store, name, expected)
                    reading.advance(expected.num_bytes / MIB)
                good = next((store for store, problem in problems.items() if problem is None), None)
                for store, problem in problems.items():
                    if problem is None:
                        continue
                    found.append(
                        mended(store, name, problem, good, expected) if heal else damage_of(store, name, problem, good)
                    )
        return found + (self.check_manifest(manifest, heal=heal) if files is None else [])

    def check_manifest(self, manifest: Manifest, *, heal: bool = True) -> list[Damage]:
        """Compare the manifests of all stores with this one, which was read from one of them. With `heal`, replace
        those that differ."""
        found = []
        name, text = f"{manifest.name}/{FILE_NAME}", manifest.to_json().encode()
        good = next((store for store in self.stores if _same(store, name, text)), None)
        for store in self.stores:
            if store is good or _same(store, name, text):
                continue
            problem = "missing, damaged or from another attempt"
            if heal and good is not None:
                try:
                    store.write_text(name, text.decode())
                except OSError as exc:
                    problem += f"; it cannot be replaced: {exc}"
                else:
                    found.append(Damage(store.path(name), problem, good.path(name), good.path(name)))
                    continue
            found.append(damage_of(store, name, problem, good))
        return found

    def prune(
        self, retention: Retention, *, newest: int | None = None, spared_s: float = 0.0, is_dry_run: bool = False
    ) -> Pruned:
        """Remove checkpoints that the policy does not retain, and leftovers of older attempts.

        Files named by a retained checkpoint stay, in whichever folder they are. newest: checkpoints after this step
        stay too and do not count; by default the step of the newest complete one. spared_s: leftovers younger than this
        many seconds stay, since a running training may be about to name them. Raises CheckpointError if a newer format
        hides which files are needed."""
        by_step = {
            step: [m for m in (_read_or_none(store, step) for store in self.stores) if m] for step in self.steps()
        }
        manifests = {step: found[0] for step, found in by_step.items() if found}
        if newest is None:
            newest = max(manifests, default=-1)
        kept = retention.kept(m for step, m in manifests.items() if step <= newest)
        kept |= {step for step in by_step if step > newest}
        needed = {name for step in kept for m in by_step[step] for name in (*m.files, f"{m.name}/{FILE_NAME}")}
        freed = 0
        for store in self.stores:
            for step in (step for step in by_step if step <= newest):
                may_be_written = spared_s > 0 and (step in kept or step not in manifests)
                before = time.time() - spared_s if may_be_written else math.inf
                freed += self._prune_folder(store, step, needed, before=before, is_dry_run=is_dry_run)
        return Pruned([step for step in manifests if step not in kept], freed)

    def rebuild(self, manifest: Manifest) -> Manifest:
        """Rewrite an incremental checkpoint as a full one, which does not depend on any other. Raises Incomplete. Its
        former files stay for other checkpoints that name them; `prune` removes those that no checkpoint names."""
        from scaleray.checkpoints.tensor_files import ALIGNMENT, new_file, write_all

        file = new_file(manifest.name, "full")
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
        size = sum(chunk.length for chunk in order) * len(self.stores) / MIB
        with stage(f"writing step {manifest.step} again", total=size, unit="MiB") as writing:
            stored, _ = write_all(self.stores, file, lambda: _contents(self.stores, order, writing))
        full = dataclasses.replace(
            manifest, tensors=tensors, files={file: stored}, chain=0, bytes_written=stored.num_bytes
        )
        self.publish(full)
        return full

    def _prune_folder(self, store: Store, step: int, needed: set[str], *, before: float, is_dry_run: bool) -> int:
        """Remove files of a step that are not needed and were written up to `before`. Returns the bytes freed in the
        first store."""
        folder = folder_name(step)
        entries = store.entries(folder)
        unneeded = [entry for entry in entries if entry.name not in needed and entry.changed_at <= before]
        if not is_dry_run:
            # the manifest first: a checkpoint must not exist without its files
            for entry in sorted(unneeded, key=lambda e: not e.name.endswith(f"/{FILE_NAME}")):
                store.delete(entry.name)
            if len(unneeded) == len(entries):
                store.delete_folder(folder)
        return sum(entry.num_bytes for entry in unneeded) if store is self.stores[0] else 0


def _read(store: Store, step: int) -> Manifest:
    name = f"{folder_name(step)}/{FILE_NAME}"
    try:
        manifest = Manifest.from_json(store.read(name), where=store.path(name))
    except (FileNotFoundError, NotADirectoryError):
        raise Incomplete(f"{store.path(name)} does not exist: the checkpoint was not finished") from None
    if manifest.step != step:
        raise Damaged(f"{store.path(name)} is that of step {manifest.step}")
    return manifest


def _read_or_none(store: Store, step: int) -> Manifest | None:
    try:
        return _read(store, step)
    except Incomplete:
        return None


def _contents(stores: list[Store], chunks: list[Chunk], writing: Stage) -> Iterator[Any]:
    import torch

    from scaleray.checkpoints.tensor_files import ALIGNMENT, read_chunk

    for chunk in chunks:
        plain = dataclasses.replace(chunk, sizes=(chunk.length,))
        yield read_chunk(stores, plain, torch.uint8).numpy().data
        writing.advance(chunk.length / MIB)
        if padding := -chunk.length % ALIGNMENT:
            yield bytes(padding)


def _same(store: Store, name: str, text: bytes) -> bool:
    try:
        return store.read(name) == text
    except OSError:
        return False


def _present(store: Store, manifest: Manifest) -> set[str]:
    """Names of those files of a checkpoint that a store has with the right length, found with one listing per
    folder."""
    found: set[str] = set()
    for folder in {name.partition("/")[0] for name in manifest.files}:
        try:
            lengths = {entry.name: entry.num_bytes for entry in store.entries(folder)}
        except OSError:
            continue
        found |= {name for name, stored in manifest.files.items() if lengths.get(name) == stored.num_bytes}
    return found


def require(catalog: Catalog, step: int | None, *, where: str) -> Manifest:
    """Return the checkpoint at `step`, or the newest complete one. Raises CheckpointError with a list of the existing
    ones, also if it differs from the run's record."""
    found = _required(catalog, step, where=where)
    check_manifest(catalog.stores[0], found)
    return found


def _required(catalog: Catalog, step: int | None, *, where: str) -> Manifest:
    steps = catalog.steps()
    if step is None:
        newest = catalog.newest()
        if newest is not None:
            return newest
        what, hint = f"the checkpoints folder of {where}", "a checkpoint is complete once it has a manifest.json"
        if not steps:
            raise CheckpointError(what, "empty", "it holds no complete checkpoint", hint)
        count = f"{len(steps)} unfinished checkpoint{'s' if len(steps) != 1 else ''}"
        raise CheckpointError.problem(what, f"holds {count} but no complete one", hint)
    try:
        return catalog.read(step)
    except Incomplete as exc:
        complete = ", ".join(str(m.step) for m in catalog.complete()) or "none"
        raise CheckpointError(
            f"the checkpoint of step {step}",
            "incomplete" if step in steps else "missing",
            str(exc),
            f"complete checkpoints: {complete}",
        ) from exc
