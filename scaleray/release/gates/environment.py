"""Code and environment of a measurement, as flat facts that can be compared.

The driver records its own machine, which may be a head node without GPUs. If workers reported theirs, these facts
replace the driver's: kinds of GPU (not their number), driver, CUDA, cuDNN and NCCL, kernel and torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scaleray.records.json_record import jsonable, leaves
from scaleray.records.run_record import RunRecord

GPU = "environment.accelerators."
KNOWN_OF_GPUS = ("names", "driver", "cuda", "cudnn", "nccl")
"""Facts that are required of the GPUs in use."""
NO_FACTS = ("nvml_error",)
"""Keys of accelerators that are not properties of the accelerators."""
OF_WORKERS = {"cpu": "environment.cpu.model", "os": "environment.os", "torch": "environment.packages.torch"}
"""Further facts that workers report about their machines, and the driver's facts that they replace."""
MISSING = "missing"
Facts = Mapping[str, Any]


def facts_of_environment(environment: Facts, workers: Sequence[Facts] = ()) -> dict[str, Any]:
    """Code and environment as `reproducibility.fingerprint.environment` recorded them, as dotted keys. workers:
    hardware of each worker or kind of worker; if empty, only the driver's hardware is known."""
    found = {}
    for key, value in leaves(jsonable(environment)):
        section = "code" if key.startswith("git.") else "environment"
        found[f"{section}.{key.removeprefix('git.')}"] = value
    gpus = [environment.get("accelerators") or {}]
    if workers:
        gpus = [one.get("accelerators") or {} for one in workers if uses_gpus([one])]
        found |= {key: _one(one[name] for one in workers if one.get(name)) for name, key in OF_WORKERS.items()
                  if any(one.get(name) for one in workers)}  # fmt: skip
    others = {key: value for key, value in found.items() if not key.startswith(GPU)}
    return others | _of_gpus(gpus)


def facts_of_run(run: RunRecord) -> dict[str, Any]:
    """Code and environment of a training."""
    return facts_of_environment(run.environment.get("environment") or {}, workers_of(run))


def workers_of(run: RunRecord) -> list[Facts]:
    """Hardware that each worker of a training reported; empty if none did."""
    return list(run.environment.get("workers") or [])


def uses_gpus(workers: Iterable[Facts]) -> bool:
    """Whether any of these workers computed on a GPU."""
    return any(str(one.get("device", "")).startswith("cuda") for one in workers)


def unknown_of_gpus(facts: Facts, may_differ: Sequence[str] = ()) -> list[str]:
    """Missing facts of a run on GPUs, except those that may differ."""
    return [
        name
        for name in KNOWN_OF_GPUS
        if facts.get(f"{GPU}{name}") in (None, [], "") and not f"{GPU}{name}".startswith(tuple(may_differ))
    ]


def unlike(here: Facts, there: Facts, may_differ: Sequence[str]) -> list[str]:
    """Keys whose values differ, as text, except those that may differ."""
    keys = sorted({*here, *there})
    return [
        f"{key} is {here.get(key, MISSING)} and {there.get(key, MISSING)}"
        for key in keys
        if here.get(key) != there.get(key) and not key.startswith(tuple(may_differ))
    ]


def _of_gpus(gpus: Sequence[Facts]) -> dict[str, Any]:
    """Facts of the GPUs of several machines: each key with its value, or all different values."""
    keys = {key for one in gpus for key in one if key != "names" and key not in NO_FACTS}
    found = {f"{GPU}{key}": _one(jsonable(one.get(key)) for one in gpus) for key in sorted(keys)}
    kinds = sorted({str(name) for one in gpus for name in one.get("names") or ()})
    return found | ({f"{GPU}names": kinds} if kinds else {})


def _one(values: Iterable[Any]) -> Any:
    """The common value, or a list of the different values."""
    different = {str(value): value for value in values}
    return next(iter(different.values())) if len(different) == 1 else [different[key] for key in sorted(different)]
