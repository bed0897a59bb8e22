"""`scaleray plan --write`: the chosen layout as a config for `scaleray train`."""

from __future__ import annotations

from pathlib import Path

import yaml

from scaleray.common.parsing import load_yaml
from scaleray.config import load_config
from scaleray.errors import ConfigError, StorageError
from scaleray.planner.answers.advise import Advice
from scaleray.planner.answers.written_config import config_keys, is_runnable


def write_config(advice: Advice, config: Path | None, path: Path) -> list[str]:
    """Write the best layout that has a strategy in `scaleray train`, based on `config`, and report it. Raises
    ConfigError if there is none, or if `scaleray train` would reject the config; StorageError if `path` cannot be
    written."""

    runnable = [choice for choice in advice.choices if is_runnable(choice.layout)]
    if not runnable:
        raise ConfigError("--write", str(path), "no layout that scaleray train can run fits", "plan without ep")
    chosen = next((choice for choice in runnable if choice.fits == "fits"), runnable[0])
    given = load_yaml(config.read_text()) if config else {}
    in_tokens = (given.get("batch") or {}).get("unit") == "tokens"
    keys = config_keys(chosen.layout, tokens_per_sample=advice.question.model.tokens_per_sample if in_tokens else None)
    # prediction with which the run is compared while running
    held_against = {
        "expected_samples_per_s": chosen.samples_per_s,
        "flops_per_sample": advice.question.model.train_flops,
    }
    keys["monitoring"] = {name: float(f"{value:.6g}") for name, value in held_against.items()}
    for section, values in keys.items():
        given[section] = {**(given.get(section) or {}), **values}
    text = yaml.safe_dump(given, sort_keys=False)
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text)
        if config is not None:
            load_config(partial, environ={})  # do not leave a config that train would reject
        partial.replace(path)
    except OSError as exc:
        raise StorageError(
            "--write", str(path), f"it cannot be written: {exc.strerror}", "choose another file"
        ) from exc
    finally:
        partial.unlink(missing_ok=True)
    lines = [f"config: {path}, {chosen.layout.describe()}"]
    if chosen is not advice.best:
        ratio = chosen.step_time_s.value / advice.best.step_time_s.value
        lines.append(
            f"  the recommended layout has no strategy in scaleray train; this one takes {ratio:.2f} times as long"
        )
    if chosen.fits != "fits":
        lines.append(
            "  it may not fit: no layout that scaleray train can run certainly does;  "
            "memory.on_out_of_memory halve may help"
        )
    if chosen.layout.checkpointing == "alternate":
        lines.append(
            "  recompute alternate is written as activations.checkpointing selective,  "
            "which keeps every matrix product and needs more memory; full is safe"
        )
    if config is None:
        lines.append("  add workload.name, or plan with -c, for scaleray train to run it")
    return lines
