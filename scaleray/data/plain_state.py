"""Convert the state of an object to JSON and back: numbers, text, arrays, containers, and objects made only of these.

On reading, classes and functions are looked up in the modules that the workload has imported and in
ray.data.preprocessors; no other module is imported. A class must transform rows, and its `__setstate__` is called."""

import base64
import collections
import importlib
import io
import math
import sys
from typing import Any

import numpy as np

from scaleray.errors import WorkloadError

TRUSTED_FUNCTIONS = "ray.data.preprocessors."
"""Package from which functions are allowed, since Ray's vectorizers contain one."""


def encoded(value: Any, where: str) -> Any:
    """Convert a value to JSON. where: its path, for the error. Raises WorkloadError for anything but data."""
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value.item() if isinstance(value, np.generic) else value
    if type(value) in (list, tuple, set, frozenset):
        return {type(value).__name__: [encoded(v, f"{where}[{n}]") for n, v in enumerate(value)]}
    if type(value) in (dict, collections.Counter, collections.OrderedDict):
        pairs = [[encoded(k, f"{where} key"), encoded(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {type(value).__name__: pairs}
    if isinstance(value, np.ndarray) and value.dtype == object:
        return {"objects": [encoded(v, where) for v in value.ravel().tolist()], "shape": list(value.shape)}
    if isinstance(value, np.ndarray | np.generic | float):
        return {"number" if not isinstance(value, np.ndarray) else "array": _packed(np.asarray(value))}
    if isinstance(value, np.dtype):
        return {"dtype": value.str}
    if isinstance(value, type) and issubclass(value, np.generic):
        return {"type": np.dtype(value).str}
    return _encoded_object(value, where)


def _encoded_object(value: Any, where: str) -> Any:
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if type(value).__name__ == "CategoricalDtype":
        return {"categories": encoded(value.categories.to_numpy(), where), "ordered": bool(value.ordered)}
    if callable(value) and str(module).startswith(TRUSTED_FUNCTIONS) and "<" not in name:
        return {"function": f"{module}:{name}"}
    kind = type(value)
    if _transforms(kind) and "<" not in kind.__qualname__:
        state = value.__getstate__()
        if not isinstance(state, dict):
            state = dict(state or {})
        fields = {key: encoded(entry, f"{where}.{key}") for key, entry in state.items()}
        return {"class": f"{kind.__module__}:{kind.__qualname__}", "state": fields}
    raise WorkloadError(
        f"the preprocessor's {where}",
        f"a {kind.__module__}.{kind.__qualname__}",
        "a run stores its preprocessor as data: numbers, text, arrays, lists and dicts",
        "turn a function into a method of its class, and define the class at the top level of a file",
    )


def decoded(found: Any) -> Any:
    """Convert JSON back to the encoded value. Raises ValueError, KeyError or TypeError if it is invalid."""
    if not isinstance(found, dict):
        return found
    kind, content = next(iter(found.items()))
    containers = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    mappings = {"dict": dict, "Counter": collections.Counter, "OrderedDict": collections.OrderedDict}
    if kind in containers:
        return containers[kind](decoded(entry) for entry in content)
    if kind in mappings:
        return mappings[kind]({decoded(key): decoded(entry) for key, entry in content})
    if kind == "objects":
        array = np.empty(len(content), dtype=object)
        for place, entry in enumerate(content):
            array[place] = decoded(entry)
        return array.reshape(found["shape"])
    if kind in ("array", "number"):
        values = np.load(io.BytesIO(base64.b64decode(content)), allow_pickle=False)
        return values if kind == "array" else values[()]
    if kind == "dtype":
        return np.dtype(content)
    if kind == "type":
        return np.dtype(content).type
    return _decoded_object(kind, content, found)


def _decoded_object(kind: str, content: Any, found: dict[str, Any]) -> Any:
    if kind == "categories":
        import pandas as pd

        return pd.CategoricalDtype(decoded(content), ordered=found["ordered"])
    if kind == "function":
        function = _named(content)
        if not str(getattr(function, "__module__", "")).startswith(TRUSTED_FUNCTIONS):
            raise ValueError(f"{content} is not a function of ray.data.preprocessors")
        return function
    if kind == "class":
        made_of = _named(content)
        if not (isinstance(made_of, type) and _transforms(made_of)):
            raise ValueError(f"{content} is not a class that transforms rows")
        made: Any = object.__new__(made_of)
        state = {name: decoded(entry) for name, entry in found["state"].items()}
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
        else:
            made.__dict__.update(state)
        return made
    raise ValueError(f"it contains {kind!r}, which is unknown")


def _transforms(kind: type) -> bool:
    return callable(getattr(kind, "transform", None)) or callable(getattr(kind, "transform_batch", None))


def _named(path: str) -> Any:
    """Class or function of a name. Importing a module runs its code, so only Ray's own modules are imported."""
    module, _, name = path.partition(":")
    try:
        if f"{module}.".startswith(TRUSTED_FUNCTIONS):
            importlib.import_module(module)
        elif module not in sys.modules:
            raise ImportError(f"no imported module has the name {module!r}")
        found: Any = sys.modules[module]
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as exc:
        raise ValueError(
            f"{path} cannot be found here ({exc}); import it in the workload's file, and load its workload first"
        ) from exc
    return found


def _packed(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
