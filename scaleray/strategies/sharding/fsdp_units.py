"""Choose the units of a model for sharding, and how far ahead they are gathered. A unit's parameters travel in one
collective: small units cost latency, and the whole model as a single unit saves no memory."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from scaleray.config.fsdp import FsdpSettings
from scaleray.errors import ConfigError, WorkloadError
from scaleray.records.text.units import GIB


@dataclass(frozen=True)
class Units:
    """Modules that are each sharded as one unit, in the order of the model, which approximates that of the forward
    pass. The model itself, with the remaining parameters, is added as the outermost unit."""

    modules: list[nn.Module]
    names: list[str]
    sizes: list[int]
    """Number of parameters in each unit, without those of units inside it."""
    root_size: int
    notes: list[str]


def choose_units(model: nn.Module, settings: FsdpSettings, workload: Any) -> Units:
    """The units requested by the settings. A module with a parameter that is also used elsewhere cannot be a unit; its
    parameters belong to the unit around it. Raises WorkloadError if the model or workload lacks them."""
    asked = {"blocks": _blocks, "size": _large_enough, "class": _of_classes}[settings.wrap](model, settings, workload)
    uses, occurrences, notes = _uses(model), Counter(map(id, _all_modules(model))), []
    chosen: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if module is model or id(module) not in asked or not any(True for _ in module.parameters()):
            continue
        inside = _uses(module)
        shared = next((p for p in inside if inside[p] * occurrences[id(module)] < uses[p]), None)
        if shared is None:
            chosen.append((name, module))
        else:
            path = next(n for n, p in module.named_parameters() if id(p) == shared)
            notes.append(f"fsdp: {name} is not a separate unit, because its {path} is also used elsewhere")
    if not chosen:
        hint = "fsdp.wrap size makes units of any model" if settings.wrap == "blocks" else "see fsdp.wrap"
        notes.append(f"fsdp: the whole model is one unit, which is gathered at once ({hint})")
    taken: set[int] = set()
    sizes = [0] * len(chosen)
    for number in reversed(range(len(chosen))):  # inner units come after the outer one, and keep what is theirs
        sizes[number] = _claim(chosen[number][1], taken)
    return Units([m for _, m in chosen], [n for n, _ in chosen], sizes, _claim(model, taken), notes)


def prefetch_distance(units: Units, settings: FsdpSettings, *, bytes_per_parameter: int) -> int:
    """Number of units, up to `prefetch`, that may be gathered ahead without exceeding `max_unsharded_gib`.

    The root's parameters count throughout. Raises ConfigError if even one unit at a time takes too much memory."""
    wanted = min(settings.prefetch, len(units.sizes))
    if settings.max_unsharded_gib is None:
        return wanted
    limit = settings.max_unsharded_gib * GIB
    for distance in range(wanted if settings.reshard_after_forward else 0, -1, -1):
        window = distance + 1 if settings.reshard_after_forward else len(units.sizes)
        if _most_at_once(units, window) * bytes_per_parameter <= limit:
            return distance if settings.reshard_after_forward else wanted
    window = 1 if settings.reshard_after_forward else len(units.sizes)
    least = _most_at_once(units, window) * bytes_per_parameter / GIB
    raise ConfigError(
        "fsdp.max_unsharded_gib",
        settings.max_unsharded_gib,
        f"the {'largest unit with the parameters outside units' if settings.reshard_after_forward else 'whole model'} "
        f"takes {_rounded_up(least)}",
        "use smaller units (fsdp.wrap), or raise this limit"
        + ("" if settings.reshard_after_forward else ", or set fsdp.reshard_after_forward"),
    )


def _most_at_once(units: Units, window: int) -> int:
    starts = range(max(1, len(units.sizes) - window + 1))
    return units.root_size + max((sum(units.sizes[i : i + window]) for i in starts), default=0)


def _rounded_up(gib: float) -> float:
    digits = 3 - math.floor(math.log10(gib)) if gib else 0
    return math.ceil(gib * 10**digits) / 10**digits


def _claim(module: nn.Module, taken: set[int]) -> int:
    """Number of a module's parameter values that are not in `taken` yet. Adds the parameters to `taken`."""
    mine = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
    taken.update(mine)
    return sum(mine.values())


def _blocks(model: nn.Module, settings: FsdpSettings, workload: Any) -> set[int]:
    blocks = getattr(workload, "blocks", None)
    found: Iterable[nn.Module] = (blocks(model) if callable(blocks) else None) or ()
    own = {id(module) for module in model.modules()}
    asked = set()
    for block in found:
        if not isinstance(block, nn.Module) or id(block) not in own:
            text = f"returned a {type(block).__name__}: it must return modules of the model it receives"
            raise WorkloadError.problem("blocks()", text)
        asked.add(id(block))
    return asked


def _of_classes(model: nn.Module, settings: FsdpSettings, workload: Any) -> set[int]:
    by_class: dict[str, list[nn.Module]] = {}
    for module in model.modules():
        by_class.setdefault(type(module).__name__, []).append(module)
    missing = [name for name in settings.wrap_classes if name not in by_class]
    if missing:
        text = f": the model has no {missing[0]}; it has {', '.join(sorted(by_class))}"
        raise ConfigError.problem("fsdp.wrap_classes", text)
    return {id(module) for name in settings.wrap_classes for module in by_class[name]}


def _large_enough(model: nn.Module, settings: FsdpSettings, workload: Any) -> set[int]:
    """Ids of units, found from the leaves up: a module becomes a unit if what remains outside its inner units is large
    enough."""
    asked: set[int] = set()
    taken: set[int] = set()

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        left = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        # a ModuleList is never called itself, so that nothing would gather it
        is_called = type(module).forward is not nn.Module.forward
        if is_called and sum(left.values()) >= settings.wrap_min_parameters:
            asked.add(id(module))
            taken.update(left)

    visit(model)
    return asked


def _all_modules(model: nn.Module) -> list[nn.Module]:
    return [module for _, module in model.named_modules(remove_duplicate=False)]


def _uses(model: nn.Module) -> Counter[int]:
    """Number of times that each parameter is registered, by id."""
    return Counter(id(p) for m in _all_modules(model) for p in m._parameters.values() if p is not None)
