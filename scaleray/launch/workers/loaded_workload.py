"""Send user code to the workers."""

import copyreg
import functools
from typing import Any

from scaleray.workload import user_modules


def ship_user_code(workload: Any) -> None:
    """Send code that exists only in the user's folder to Ray's workers, together with the workload."""
    from ray import cloudpickle

    modules = user_modules(workload)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    names = {module.__name__ for module in modules}
    cached = type(functools.cache(ship_user_code))

    def reduced(function: Any) -> Any:
        """Pickle a function under functools.cache by value: by name, as is the default, workers could not import it."""
        if function.__module__ not in names:
            return function.__qualname__
        return _cached_again, (function.__wrapped__, function.cache_parameters())

    copyreg.pickle(cached, reduced)


def _cached_again(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)
