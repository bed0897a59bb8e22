"""Write docs/alerts.md, docs/api.md, docs/config.md, docs/layouts.md, docs/metrics.md, docs/private_parts.md and docs/schemas from the code, so that each fact stands once.

`make docs` runs it; a test fails where a page is out of date. Needs neither torch nor Ray.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for the page beside this file

from python_api import api_page
from tested_files import tested_files_page

from scaleray.common import metric_names
from scaleray.common.metric import RANK_LABELS, RUN_LABELS
from scaleray.common.private_parts import PARTS, SWITCH, PrivatePart
from scaleray.config.parallel import AXES, ParallelSettings, degrees_of
from scaleray.config.reference import key_rows
from scaleray.config.strategy_traits import TRAITS
from scaleray.errors import ConfigError, first_line
from scaleray.live.rules.rule_evaluator import RULES
from scaleray.records.schemas import SCHEMAS

FOLDER = Path(__file__).parent
NOTE = "<!-- Written by docs/generate.py (`make docs`); edit the code instead. -->"


def config_page() -> str:
    """Every key of the config, a table a section."""
    lines = [
        "# Config keys",
        "",
        NOTE,
        "",
        "A key stands in the YAML file as `section: {key: value}`, on the command line as `--section.key value`, and in the environment as",
        "`SCALERAY_SECTION__KEY`. Options win over the environment, and both over the file. [recipe.md](sweep.md) tells what is derived.",
        "`scaleray config keys SECTION` prints a section of this page.",
        "",
        "Editors with a YAML language server complete keys, show their meaning and mark mistakes where the first line of the file names the",
        "schema, which `scaleray config schema --out config.schema.json` writes; the repository has it in [docs/schemas](schemas), beside those of",
        "the `record.json` of a run, study and sweep:",
        "",
        "```yaml",
        "# yaml-language-server: $schema=config.schema.json",
        "```",
    ]
    for section, rows in groupby(key_rows(), key=lambda row: row.key.partition(".")[0] if "." in row.key else "run"):
        lines += ["", f"## {section}", "", "| key | may be | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{row.key}` | {_cell(row.type)} | {_cell(row.default)} | {_cell(row.meaning)} |" for row in rows]
    return "\n".join([*lines, ""])


def metrics_page() -> str:
    """Every metric, a table a section of MLflow."""
    lines = [
        "# Metrics",
        "",
        NOTE,
        "",
        "Names as MLflow has them; the part before the slash is a section of its page. Evaluation metrics are named `SPLIT/METRIC` (`test/loss`,",
        "`test/accuracy`) and come from the workload. A name that MLflow does not take (`recall@10`) has `_` there,",
        "with a warning. A point, param, tag or file that it refuses is kept in the run folder's `refused.jsonl`, and all others arrive.",
        "",
        "A training ends with the link `all runs:`, which opens the view `Trainings` of its experiment: a table with workers, global batch, learning",
        "rate, quality and owner, and charts with the loss first. The run itself has as params what it uses (`config.yaml` has every setting), its data",
        "and commit, `report.html` (not with `--no-report`), and units and meanings in its description. Studies and sweeps have data, commit and owner",
        "as well; what `Step` counts below an axis stands in the title of its section.",
    ]
    lines += ["", *_in_prometheus()]
    ordered = sorted(metric_names.ALL, key=lambda metric: metric.name.partition("/")[0])
    for section, metrics in groupby(ordered, key=lambda metric: metric.name.partition("/")[0]):
        lines += ["", f"## {section}", "", "| metric | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{metric.name}` | {_cell(metric.unit)} | {_cell(metric.help)} |" for metric in metrics]
    return "\n".join([*lines, ""])


def _in_prometheus() -> list[str]:
    lines = [
        "## In Prometheus",
        "",
        "What is published of a run while it lives; [monitoring.md](monitoring.md) tells how. Every series has the labels",
        f"{_codes(RUN_LABELS)}; one that every rank has also {_codes(RANK_LABELS)}.",
        "",
        "| metric | kind | series | further labels | unit | meaning | in MLflow |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, metric in metric_names.IN_PROMETHEUS.items():
        series, in_mlflow = (
            "a rank" if metric.is_by_rank else "a run",
            f"`{metric.name}`" if metric.is_in_mlflow else "",
        )
        cells = (f"`{name}`", metric.kind, series, _codes(metric.labels), metric.unit, metric.help, in_mlflow)
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return lines


def alerts_page() -> str:
    """Every rule, with what it costs to leave it alone and what to do."""
    lines = [
        "# Alerts",
        "",
        NOTE,
        "",
        "What is raised, by Prometheus from `dashboards/alerts.yaml` and, where the third column says so, by the run itself;",
        "[monitoring.md](monitoring.md#alerts) tells how. Values from which on are those of the section `alerts` in [config.md](config.md).",
        "",
        "| rule | severity | by the run itself | what is seen | what it costs | what to do |",
        "|---|---|---|---|---|---|",
    ]
    for rule in RULES:
        seen = rule.summary.format(value="N", of="a GPU" if rule.name.startswith("gpu") else "a rank")
        itself = "yes" if rule.predicate is not None else "no"
        cells = (f"`{rule.name}`", rule.severity, itself, seen, rule.costs, rule.advice)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join([*lines, ""])


def private_parts_page() -> str:
    """Every private part of Ray and MLflow that is overridden, with its gain and the consequence of doing without."""
    head = ["| part | file | gain | without it |", "|---|---|---|---|"]
    lines = [
        "# Private parts of Ray, MLflow and torch",
        "",
        NOTE,
        "",
        "scaleray overrides some private names of Ray and MLflow. Each part is used only if everything that it replaces has the recorded",
        "signature (`scaleray/common/private_parts.py`); a difference switches that part off, with one line in the log. Ray has no upper bound",
        "for that reason: with a newer release, everything works without these parts.",
        "",
        "## Parts that save time",
        "",
        "They also need the tested release (`scaleray/common/installed.py`): with any other, a start is slower until scaleray's tests have run with it.",
        f"`{SWITCH}=0` switches all of them off.",
        "",
        *head,
        *(_private_part(part) for part in PARTS if not part.protects),
        "",
        "## Parts that protect",
        "",
        "They depend on the signatures alone, and have no common switch.",
        "",
        *head,
        *(_private_part(part) for part in PARTS if part.protects),
        "",
        "## Private names of torch",
        "",
        "torch has no public way for these, so they have no switch. They are written for torch 2.13; the tests of the strategies and of the data",
        "fail if a release moves them.",
        "",
        "| file | use | without it |",
        "|---|---|---|",
        *(f"| `{file}` | {use} | {without} |" for file, use, without in OF_TORCH),
    ]
    return "\n".join([*lines, ""])


def _private_part(part: PrivatePart) -> str:
    return f"| {part.name} | `{part.file}` | {_cell(part.gain)} | {_cell(part.without)} |"


OF_TORCH = (
    (
        "scaleray/strategies/sharding/unsharding.py",
        "removes the hooks of `fully_shard` after a training",
        "the user's model stays sharded",
    ),
    (
        "scaleray/strategies/sharding/counted_collectives.py",
        "counts and times the collectives of `fully_shard`",
        "`fsdp` cannot report its communication",
    ),
    (
        "scaleray/strategies/pipeline/pipeline_shards.py",
        "shards the parameters of a pipeline's stage between steps",
        "sharding within a pipeline does not work",
    ),
    (
        "scaleray/data/iterable.py",
        "gives an IterableDataset the worker info of torch's loader",
        "a dataset that splits its rows by worker info is read in full by every rank",
    ),
    (
        "scaleray/training/health/flight_recorder.py",
        "keeps torch's compiler from being imported for the report of a hang",
        "the report takes 2 to 6 seconds longer on each rank",
    ),
)


def layouts_page() -> str:
    """Every layout of the workers that was verified, with its distance to one process or the reason of its refusal."""
    path = max((FOLDER.parent / "jobs/benchmarks/results").glob("layouts-*.json"))
    found = json.loads(path.read_text())
    lines = [
        "# Layouts",
        "",
        NOTE,
        "",
        "Largest relative distance to one process in float64, with an epoch's end, a resume from one process, clipping and evaluations,",
        "with the given numbers of micro-batches in each worker's step. Two cores",
        f"([figures and whole commands](../{path.relative_to(FOLDER.parent)})); the last column has the number of the command:",
        "",
    ]
    lines += [
        f"{number}. {run['date']}: `{run['command'].partition(' --workload.')[0]}`{run['note'] and ', '}{run['note']}: "
        f"{run['steps']} steps, sequences of {run['tokens']} tokens"
        for number, run in enumerate(found["runs"], 1)
    ]
    lines += [
        "",
        "| workers | layout | micro-batches | loss | gradient norm | final values | from |",
        "|---|---|---|---|---|---|---|",
    ]
    refused = []
    best: dict[tuple[str, int, int], tuple[dict[str, Any], int]] = {}
    for number, run in enumerate(found["runs"], 1):
        for one in run["outcomes"]:  # the first command that did not refuse a layout counts
            key = one["layout"] or one["strategy"], one["world_size"], one["accumulation"]
            if key not in best or best[key][0]["verdict"] == "refused" != one["verdict"]:
                best[key] = one, number
    for one, number in sorted(best.values(), key=lambda pair: pair[0]["world_size"]):
        layout = one["layout"] or one["strategy"]
        if one["verdict"] == "refused":
            refused.append(f"| {one['world_size']} | {layout} | {one['words']} |")
            continue
        distances = (one["comparison"][name] for name in ("loss", "grad_norm", "parameters"))
        figures = " | ".join(f"{distance:.1e}" for distance in distances)
        verdict = "" if one["verdict"] == "equal" else f" **{one['verdict']}**"
        lines.append(f"| {one['world_size']} | {layout}{verdict} | {one['accumulation']} | {figures} | {number} |")
    reasons = [
        "",
        "## Refused for this model",
        "",
        "| workers | layout | reason |",
        "|---|---|---|",
        *dict.fromkeys(refused),
    ]
    return "\n".join([*lines, *(reasons if refused else []), "", *_axes_of_strategies(), ""])


def _axes_of_strategies() -> list[str]:
    """Table of the axes that each strategy combines, with the reasons for those that are refused although all axes around them exist."""
    axes = (*AXES, "expert")
    lines = [
        "## Refused for any model",
        "",
        "Axes that each strategy combines in any product (`scaleray/config/strategy_traits.py`). The others are refused before workers start:",
        "`parallel.tensor is 2: strategy.name is ddp, which has no such axis`.",
        "",
        f"| strategy | {' | '.join(axes)} |",
        "|---" * (1 + len(axes)) + "|",
    ]
    reasons = []
    for strategy, traits in list(TRAITS.items())[1:]:  # without `single`
        lines += [f"| `{strategy}` | {' | '.join('yes' if axis in traits.axes else '' for axis in axes)} |"]
        if "shard" in traits.axes and "expert" not in traits.axes:
            try:
                degrees_of(ParallelSettings(shard=2, expert=2), strategy, 8)
            except ConfigError as exc:
                reasons.append(f"- `{strategy}`: {first_line(exc)}")
    return [*lines, "", *reasons]


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _text_of(schema: Callable[[], dict[str, object]]) -> Callable[[], str]:
    return lambda: json.dumps(schema(), indent=2) + "\n"


PAGES = {
    "alerts.md": alerts_page,
    "api.md": lambda: api_page(NOTE),
    "cluster_files.md": lambda: tested_files_page(NOTE),
    "config.md": config_page,
    "layouts.md": layouts_page,
    "metrics.md": metrics_page,
    "private_parts.md": private_parts_page,
    **{f"schemas/{name}.schema.json": _text_of(schema) for name, schema in SCHEMAS.items()},
}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).parent.mkdir(exist_ok=True)
        (FOLDER / name).write_text(page())
