"""Damage to a checkpoint's files, and their replacement by a good copy."""

from dataclasses import dataclass

from scaleray.checkpoints.manifest import StoredFile
from scaleray.checkpoints.storage import Store

UNREADABLE, ABSENT = "the storage does not return it", "missing"


@dataclass(frozen=True)
class Damage:
    """A file that differs from its manifest. healed_from: copy that replaced it, if any. good_at: location of an intact
    copy; if there is none, the checkpoint is lost."""

    file: str
    problem: str
    healed_from: str | None = None
    good_at: str | None = None

    @property
    def is_unreadable(self) -> bool:
        """Whether the storage did not return the file, which does not prove that its bytes are bad."""
        return self.problem.startswith(UNREADABLE)

    @property
    def is_missing(self) -> bool:
        """Whether the file is missing from the store."""
        return self.problem == ABSENT

    @property
    def is_lost(self) -> bool:
        """Whether no store has an intact file."""
        return self.good_at is None


def problem_of(store: Store, name: str, expected: StoredFile) -> str | None:
    """Text about how a store's file differs from its manifest; None for an intact file."""
    try:
        sha256, length = store.digest(name)
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    except OSError as exc:
        return f"{UNREADABLE}: {exc}" if not store.is_local else f"it cannot be read: {exc}"
    if length != expected.num_bytes:
        return f"{length} bytes instead of {expected.num_bytes}"
    return None if sha256 == expected.sha256 else "its SHA-256 differs"


def damage_of(store: Store, name: str, problem: str, good: Store | None) -> Damage:
    """Damage that cannot be repaired. good: store with an intact copy, if any."""
    return Damage(store.path(name), problem, good_at=good.path(name) if good else None)


def mended(store: Store, name: str, problem: str, good: Store | None, expected: StoredFile) -> Damage:
    """Damage after replacing the file with the copy in `good`; not repaired if `good` is None or copying fails."""
    if good is None:
        return damage_of(store, name, problem, None)
    try:
        written = StoredFile(*store.copy_from(good, name))
    except OSError as exc:
        return damage_of(store, name, f"{problem}; it cannot be replaced: {exc}", good)
    if written != expected:
        return damage_of(store, name, f"{problem}; its copy changed while it was read", None)
    return Damage(store.path(name), problem, good.path(name), good.path(name))
