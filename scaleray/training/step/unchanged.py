"""Trial passes, after which the model and the workload are restored."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from scaleray.common.carried_state import IS_TRIED
from scaleray.training.health.attributes import PLAIN, has_extra_state
from scaleray.training.health.live_memory import local_part


@contextlib.contextmanager
def unchanged_model(workload: Any, module: nn.Module) -> Iterator[None]:
    """Context that restores parameters, buffers, modes and the workload's own state on exit.

    Copies are on the same devices as the values. Those of trained parameters take no more memory than gradients will.
    Frozen parameters are left out if they take more than that, as the base of adapters does; a teacher, which a loss
    may change, takes no more."""
    trained = [p for p in module.parameters() if p.requires_grad]
    frozen = [p for p in module.parameters() if not p.requires_grad]
    kept = [*trained, *(frozen if _bytes(frozen) <= _bytes(trained) else [])]
    with unchanged_buffers(workload, module):
        copies = [(part, part.detach().clone(), part._version) for part in map(local_part, kept)]
        try:
            yield
        finally:
            with torch.no_grad():
                for part, value, version in copies:
                    if part._version != version:
                        part.copy_(value)


@contextlib.contextmanager
def unchanged_buffers(workload: Any, module: nn.Module) -> Iterator[None]:
    """Like `unchanged_model`, but without the parameters, which other code restores. Counters among the attributes of a
    module or of the workload, and modes, are restored as well."""
    buffers = [(part, name, b) for part in module.modules() for name, b in part._buffers.items() if b is not None]
    values = [local_part(b).detach().clone() for _, _, b in buffers]
    holders = [*module.modules(), *([workload] if hasattr(workload, "__dict__") else [])]
    plain = [
        (holder, set(vars(holder)), {k: v for k, v in vars(holder).items() if isinstance(v, PLAIN)})
        for holder in holders
    ]
    extra = [(part, copy.deepcopy(part.get_extra_state())) for part in module.modules() if has_extra_state(part)]
    has_state = callable(getattr(workload, "state_dict", None)) and callable(getattr(workload, "load_state_dict", None))
    state = copy.deepcopy(workload.state_dict()) if has_state else None
    was_tried = IS_TRIED.set(True)
    try:
        yield
    finally:
        IS_TRIED.reset(was_tried)
        with torch.no_grad():
            for (part, name, buffer), value in zip(buffers, values, strict=True):
                part._buffers[name] = buffer
                local_part(buffer).copy_(value)
        if has_state:
            workload.load_state_dict(state)
        for holder, names, attributes in plain:
            now = vars(holder)
            # a counter that begins as an attribute of the class is one of the instance from its first count on
            for name in [name for name, value in now.items() if name not in names and isinstance(value, PLAIN)]:
                del now[name]
            now.update(attributes)
        for part, value in extra:
            part.set_extra_state(value)


def _bytes(parameters: list[nn.Parameter]) -> int:
    return sum(local_part(p).numel() * p.element_size() for p in parameters)
