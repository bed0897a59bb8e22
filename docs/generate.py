"""Write docs/config.md and docs/metrics.md from the code, so that each fact stands once.

`make docs` runs it; a test fails where a page is out of date. Needs neither torch nor Ray.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from scaleray import metric_names
from scaleray.config.reference import key_rows

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
        "`SCALERAY_SECTION__KEY`. Options win over the environment, and both over the file. [recipe.md](recipe.md) tells what is derived.",
    ]
    for section, rows in groupby(key_rows(), key=lambda row: row.key.partition(".")[0] if "." in row.key else "run"):
        lines += ["", f"## {section}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
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
        "`test/accuracy`) and come from the workload.",
    ]
    ordered = sorted(metric_names.ALL, key=lambda metric: metric.name.partition("/")[0])
    for section, metrics in groupby(ordered, key=lambda metric: metric.name.partition("/")[0]):
        lines += ["", f"## {section}", "", "| metric | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{metric.name}` | {_cell(metric.unit)} | {_cell(metric.help)} |" for metric in metrics]
    return "\n".join([*lines, ""])


PAGES = {"config.md": config_page, "metrics.md": metrics_page}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
