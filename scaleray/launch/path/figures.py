"""The figures in what a command prints as JSON, by the names under which a path shows them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any


def figures_of(printed: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a training, a study, a plan, a sweep, a profile, gates or a promotion."""
    found: dict[str, Any] = {}
    for name in ("samples_per_s", "final_loss", "training_time_s", "steps", "num_layouts", "version"):
        found[name] = printed.get(name)
    found.update(printed.get("metrics") or {})
    memory = printed.get("peak_memory_bytes")
    if isinstance(memory, list) and memory:
        found["peak_memory_gib"] = max(memory) / 2**30
    for part in (_of_study, _of_plan, _of_sweep, _of_profile, _of_gates):
        found.update(part(printed))
    return numbers_of(found)


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Those of the values that are finite numbers."""
    kinds = (int, float)
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    }


def _of_study(printed: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for curve in printed.get("curves") or ():
        for point in curve["points"]:
            workers = point["point"]["workers"]
            yield f"efficiency on {workers}", point["efficiency"]["value"]
            yield f"samples/s on {workers}", _value(point["point"].get("samples_per_s"))


def _of_plan(printed: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for point in printed.get("curve") or ():
        yield f"predicted samples/s on {point['num_gpus']}", _value(point["samples_per_s"])


def _of_sweep(printed: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    trials = printed.get("trials") or ()
    if trials:
        yield "trials", len(trials)
        for trial in trials:
            setting = f"batch {trial['batch_size']}, rule {trial['rule']}, learning rate {trial['learning_rate']:g}"
            yield f"{setting}, seed {trial['seed']}: {trial['metric']}", trial.get("value")


def _of_profile(printed: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    verdict = printed.get("verdict")
    if isinstance(verdict, Mapping) and verdict.get("primary"):
        yield f"share of a step: {verdict['limit']}", verdict["primary"].get("share")
        yield f"speed-up without {verdict['limit']}", verdict["primary"].get("gain")


def _of_gates(printed: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    gates = printed.get("gates")
    for gate in gates if isinstance(gates, list) else ():
        for check in gate.get("checks") or ():
            for name, value in (check.get("numbers") or {}).items():
                yield f"{check['what']}: {name}", value


def _value(estimate: Any) -> Any:
    return estimate.get("value") if isinstance(estimate, Mapping) else estimate
