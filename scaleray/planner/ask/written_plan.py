"""`scaleray plan --write`: the chosen layout as a config for `scaleray train`."""

from pathlib import Path

import yaml

from scaleray.common.parsing import load_yaml
from scaleray.config import load_config
from scaleray.config.parallel import AUTO
from scaleray.errors import ConfigError, StorageError
from scaleray.planner.answers.advise import Advice, Choice
from scaleray.planner.answers.written_config import config_keys, refusal


def write_config(advice: Advice, config: Path | None, path: Path) -> list[str]:
    """Write the best layout that `scaleray train` accepts, based on `config`; return lines about it. Raises ConfigError
    if there is none, StorageError if `path` cannot be written."""
    chosen, why_not = runnable(advice)
    given = load_yaml(config.read_text()) if config else {}
    if given.get("parallel") == AUTO:
        del given["parallel"]
    keys = config_keys(chosen.layout, advice.question)
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
        lines.append(f"  scaleray train refuses the recommended layout; this one takes {ratio:.2f} times as long")
        lines.append(f"  {why_not}")
    if chosen.fits != "fits":
        lines.append(
            "  it may not fit: no layout that scaleray train can run certainly does; "
            "memory.on_out_of_memory halve may help"
        )
    if chosen.layout.checkpointing == "alternate":
        lines.append(
            "  recompute alternate is written as activations.checkpointing selective, "
            "which keeps every matrix product and needs more memory; full is safe"
        )
    if config is None:
        lines.append("  add workload.name, or plan with -c, so that scaleray train can run it")
    return lines


def runnable(advice: Advice) -> tuple[Choice, str]:
    """Return the best choice that `scaleray train` accepts, if possible one that certainly fits, and the reason if it
    refuses the recommended one. Raises ConfigError if it accepts none."""
    first = ""
    for choice in sorted(advice.choices, key=lambda one: one.fits != "fits"):
        why = refusal(choice.layout, advice.question)
        if not why:
            return choice, first
        first = first or why
    raise ConfigError.problem("layout", f": scaleray train refuses all {len(advice.choices)}: {first.rstrip('.')}")
