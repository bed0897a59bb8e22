"""A user's Dataset as returned by `datasets()`, before any row was read, and a lock for the threads that read it.

Reading a row changes the state of many Datasets: an open file, a cached shard, a cursor. The state to send to other
processes is therefore recorded before the first row is read. Within a process, readers of user code take turns row by
row, as two splits may share a handle, directly or through a cache, a class or a module."""

import io
import pickle
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from scaleray.errors import DataError, text_of

SHARED = (np.ndarray, torch.Tensor, type, types.FunctionType, types.ModuleType)
"""Types whose objects are not copied: memory of any size, and code. Arrow tables are not among them."""
DEPTH = 6  # levels of attributes that are searched for the one that cannot be pickled
ITEMS = 8  # items of a list or dict that are searched


class AsGiven:
    """State of a Dataset as pickled bytes, and its arrays and code, which are shared with the original.

    problem: error for a Dataset that cannot be pickled, raised by `copy` and by pickling.
    """

    def __init__(self, dataset: Any) -> None:
        self.problem: DataError | None = None
        self._state = b""
        self._shared: list[Any] = []
        try:
            self._state, self._shared = _pickled(dataset)
        except Exception as exc:
            self.problem = _problem(dataset, exc)

    def copy(self, *, is_writable: bool = False) -> Any:
        """The Dataset in its recorded state. is_writable: copy arrays that cannot be written."""
        if self.problem is not None:
            raise self.problem
        shared = [_writable(value) if is_writable else _own_counter(value) for value in self._shared]
        return _Unpickler(io.BytesIO(self._state), shared).load()

    def __getstate__(self) -> dict[str, Any]:
        if self.problem is not None:
            raise self.problem
        return self.__dict__


class _Turns:
    """Reentrant lock that waiting threads get in turn, so that a reader of many rows does not block others."""

    def __init__(self) -> None:
        self._next, self._turn, self._owner, self._depth = threading.Lock(), threading.RLock(), 0, 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        with self._next:  # held by the thread that is next
            self._turn.acquire()
        self._owner, self._depth = me, 1

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            self._turn.release()


TURNS = _Turns()
"""Lock for all threads of this process that read rows through user code."""


def refuse_unsendable(sources: Mapping[str, Any]) -> None:
    """Raise DataError for the first source whose Dataset cannot be sent to another process."""
    for source in sources.values():
        if (problem := problem_of(source)) is not None:
            raise problem


def problem_of(source: Any) -> DataError | None:
    """Error for a source whose Dataset cannot be sent to another process; None if it can."""
    while hasattr(source, "transform") and hasattr(source, "source"):
        source = source.source
    given = getattr(source, "as_given", None)
    return given.problem if isinstance(given, AsGiven) else None


def _writable(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value


def _own_counter(value: Any) -> Any:
    """A private copy of a number shared by processes, such as a Hugging Face stream's epoch; other values unchanged."""
    is_counter = isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_shared()
    return value.clone() if is_counter else value


def _shared_object(number: int) -> Any:
    """Name that stands for a shared object in the pickled bytes; `_Unpickler` replaces it."""
    raise pickle.UnpicklingError(f"object {number} is missing")


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.shared: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        is_shared = isinstance(value, SHARED) or (type(value).__module__, type(value).__name__) == (
            "pyarrow.lib",
            "Table",
        )
        if not is_shared or value is _shared_object:
            return NotImplemented
        self.shared.append(value)
        return _shared_object, (len(self.shared) - 1,)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _shared_object.__name__):
            return self._shared.__getitem__
        return super().find_class(module, name)


def _pickled(value: Any) -> tuple[bytes, list[Any]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.shared


def _problem(dataset: Any, error: Exception) -> DataError:
    """Error that names the class and the attribute that cannot be pickled."""
    owner, name, value = next(_unpicklable(dataset, DEPTH), (type(dataset).__name__, "", dataset))
    what = f"{name} of the Dataset {owner}" if name else f"the Dataset {owner}"
    kind = type(value)
    return DataError(
        what,
        f"a {kind.__module__}.{kind.__qualname__}",
        f"it cannot be sent to other processes ({text_of(error)})",
        "open it in __getitem__ when the first row is read: set it to None in __init__, or omit it in __getstate__; "
        "--local with one worker reads it in this process",
    )


def _unpicklable(owner: Any, depth: int) -> Iterator[tuple[str, str, Any]]:
    """Attributes that cannot be pickled, innermost first: class of the owner, name, value."""
    for name, value in getattr(owner, "__dict__", {}).items():
        items = {name: value}
        if isinstance(value, list | tuple):
            items = {f"{name}[{number}]": item for number, item in enumerate(value[:ITEMS])}
        elif isinstance(value, dict):
            items = {f"{name}[{key!r}]": item for key, item in list(value.items())[:ITEMS]}
        for place, item in items.items():
            try:
                _pickled(item)
            except Exception:
                if depth:
                    yield from _unpicklable(item, depth - 1)
                yield type(owner).__name__, place, item
