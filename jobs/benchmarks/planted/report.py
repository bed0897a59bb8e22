"""What came of trainings with planted faults: the verdict on each beside what should have been said, in tables."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import harness

from planted.faults import BY_NAME, FAULTS, IMPACTS, STRATEGIES, Fault
from planted.runs import kind_of, step_time, verdict_on
from scaleray.profiling.verdict.findings import Limit, Verdict


def row_of(result: dict[str, Any], healthy_s: dict[tuple[str, bool], float]) -> dict[str, Any]:
    """A finished training beside what should have been said of it."""
    settings, fault = result["settings"], BY_NAME[result["settings"]["fault"]]
    verdict = verdict_on(result)
    step_s = step_time(result)
    base_s = healthy_s[kind_of(settings)]
    one = verdict.primary
    row = {
        **settings,
        "found": str(one.limit),
        "phase": one.phase,
        "class_right": one.limit is fault.limit and (fault.phase is None or one.phase == fault.phase),
        "impact": step_s / base_s - 1,
        "gain": step_s / base_s,
        "what_if": gain_of(verdict, fault),
        "share": one.share,
        "confidence": verdict.confidence,
        "sentence": verdict.sentence,
        "others": [str(other.limit) for other in verdict.others],
    }
    if fault.limit is Limit.STRAGGLER or fault.names_rank:
        row["rank_right"] = one.ranks == (settings["rank"],)
    if fault.has_bucket:
        row["bucket_off"] = layers_off(one.layers, settings["layer"])
    if fault.more:
        row["second_right"] = bool(set(fault.more) & {other.limit for other in verdict.others})
    return row


def layers_off(named: str, planted: int) -> int | None:
    """How many layers, of which each has a bucket, the named ones (`2-3`) are away from the planted one."""
    numbers = [int(number) for number in re.findall(r"\d+", named)]
    return max(0, min(numbers) - planted, planted - max(numbers)) if numbers else None


def gain_of(verdict: Verdict, fault: Fault) -> float | None:
    """What the verdict says that removing the fault gives: with two at once, both."""
    wanted = {fault.limit, *fault.more}
    found = [one for one in (verdict.primary, *verdict.others) if one.limit in wanted and one.share is not None]
    return 1 / (1 - sum(one.share or 0.0 for one in found)) if found else None


def describe(results: Sequence[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The tables, and a row for each training."""
    healthy: dict[tuple[str, bool], list[float]] = {}
    for result in results:
        if result["settings"]["fault"] == "healthy":
            healthy.setdefault(kind_of(result["settings"]), []).append(step_time(result))
    healthy_s = {kind: statistics.median(times) for kind, times in healthy.items()}
    rows = [row_of(r, healthy_s) for r in results if kind_of(r["settings"]) in healthy_s]
    texts = [_summary(rows), _by_fault(rows), _confusion(rows)]
    planted = [[fault.name, str(fault.limit), fault.planted] for fault in FAULTS]
    texts.append("## What is planted\n\n" + harness.table(["fault", "class", "how"], planted))
    return "\n\n".join(texts), rows


def compact(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each fault, strategy and size, by seed."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["fault"], row["strategy"], row["size"]), []).append(row)
    lists = ("seed", "found", "class_right", "rank_right", "bucket_off", "impact", "what_if")
    found = []
    for (fault, strategy, size), here in groups.items():
        columns = {name: [_short(row.get(name)) for row in here] for name in lists}
        known = {name: values for name, values in columns.items() if any(value is not None for value in values)}
        found.append({"fault": fault, "strategy": strategy, "size": size, **known})
    return found


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _share(values: Sequence[bool]) -> str:
    return f"{sum(values)}/{len(values)} ({sum(values) / len(values):.1%})" if values else "-"


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    healthy = [row for row in rows if row["fault"] == "healthy"]
    lines = [f"False alarms: {sum(not row['class_right'] for row in healthy)} in {len(healthy)} healthy trainings."]
    faulty = [row for row in rows if row["fault"] != "healthy"]
    for low, high in zip(IMPACTS, (float("inf"), *IMPACTS), strict=False):
        here = [row for row in faulty if low <= row["impact"] < high]
        if here:
            lines.append(
                _line(
                    f"Measured impact of {low:.0%} and more" if high > 1 else f"{max(0.0, low):.0%} to {high:.0%}", here
                )
            )
    return "\n".join(f"- {line}" for line in lines)


def _line(title: str, rows: Sequence[dict[str, Any]]) -> str:
    what_if = [row["what_if"] / row["gain"] for row in rows if row["what_if"] and row["class_right"]]
    ranks = [row["rank_right"] for row in rows if "rank_right" in row and row["class_right"]]
    buckets = [row["bucket_off"] for row in rows if row.get("bucket_off") is not None]
    return (
        f"{title}: class right {_share([row['class_right'] for row in rows])}, rank right {_share(ranks)}, bucket "
        f"within 1 {_share([off <= 1 for off in buckets])}, what-if within 10 % "
        f"{_share([abs(ratio - 1) <= 0.1 for ratio in what_if])}."
    )


def _by_fault(rows: Sequence[dict[str, Any]]) -> str:
    table = []
    for fault in FAULTS:
        for strategy in STRATEGIES:
            for size in sorted({row["size"] for row in rows if row["fault"] == fault.name}, reverse=True):
                here = [r for r in rows if (r["fault"], r["strategy"], r["size"]) == (fault.name, strategy, size)]
                if here:
                    ratios = [r["what_if"] / r["gain"] for r in here if r["what_if"]]
                    table.append(
                        [
                            fault.name,
                            strategy,
                            f"{size:.0%}",
                            _share([r["class_right"] for r in here]),
                            _share([r["rank_right"] for r in here if "rank_right" in r]),
                            _share([r["bucket_off"] <= 1 for r in here if r.get("bucket_off") is not None]),
                            harness.show([100 * r["impact"] for r in here]),
                            harness.show(ratios, "{:.2f}"),
                        ]
                    )
    header = [
        "fault",
        "strategy",
        "planted",
        "class right",
        "rank right",
        "bucket within 1",
        "impact, %",
        "what-if / gain",
    ]
    return "## By fault\n\n" + harness.table(header, table)


def _confusion(rows: Sequence[dict[str, Any]]) -> str:
    texts = []
    for size in sorted({row["size"] for row in rows if row["size"]}, reverse=True):
        of_size = [row for row in rows if row["size"] in (size, 0.0)]
        columns = list(dict.fromkeys([*(str(f.limit) for f in FAULTS), *(row["found"] for row in of_size)]))
        counts = Counter((row["fault"], row["found"]) for row in of_size)
        table = [[f.name, *(str(counts[f.name, column] or "") for column in columns)] for f in FAULTS]
        texts.append(f"## What was found, planted {size:.0%}\n\n" + harness.table(["planted", *columns], table))
    return "\n\n".join(texts)
