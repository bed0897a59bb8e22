"""How user code reaches the workers."""

from __future__ import annotations

from typing import Any

from scaleray.workload import user_modules


def ship_user_code(workload: Any) -> None:
    """Let code that exists in the user's folder only travel to Ray's workers with the workload."""
    from ray import cloudpickle

    for module in user_modules(workload):
        cloudpickle.register_pickle_by_value(module)
