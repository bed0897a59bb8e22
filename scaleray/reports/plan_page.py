"""A plan as one HTML page that needs nothing else: choices, frontier, memory bars, time bars and the curve with its band, drawn as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from scaleray.planner.advise import Advice, Choice
from scaleray.planner.checkpoints import CheckpointCost
from scaleray.planner.memory import GIB
from scaleray.planner.outlook import Outlook
from scaleray.planner.to_target import Way
from scaleray.reports.plan import checkpoint_lines, why
from scaleray.reports.plan_target import WAY_CAPTION, WAY_COLUMNS, shown_ways, way_cells

COLOURS = ("#3b6fb6", "#e0913a", "#5a9e5a", "#c45b5b", "#8a6fb0", "#8c7460", "#d488b4", "#7f7f7f", "#b5b04a", "#4aa9b5")
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:1050px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;width:100%;font-size:14px}td,th{padding:.3em .6em;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto}.note{color:#666;font-size:13px}
@media (prefers-color-scheme:dark){body{background:#181818;color:#ddd}td,th{border-color:#444}svg text{fill:#ccc}}
"""


def plan_page(
    advice: Advice, seen: Outlook, *, rows: int = 10, kept: CheckpointCost | None = None, ways: Sequence[Way] = ()
) -> str:
    """The page. Nothing in it is loaded from elsewhere."""
    question, best = advice.question, advice.best
    cluster = question.cluster
    title = f"{question.model.name} on {cluster.num_nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"
    shown = advice.choices[:rows]
    memory = [
        (choice.layout.strategy, {name: value / GIB for name, value in choice.memory.parts().items()})
        for choice in shown
    ]
    times = [(choice.layout.strategy, choice.step.parts()) for choice in shown]
    notes = (*cluster.notes, *question.model.notes)
    return "\n".join([
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>", f"<h1>{escape(title)}</h1>",
        f"<p><b>recommended: {escape(best.layout.describe())}</b><br>{escape(why(advice))}.<br>{escape(seen.limit)}.<br>next doubling: {escape(seen.doubling)}.</p>",
        "" if best.is_trusted else "<p><b>Do not trust the figures alone:</b> nothing was measured on this model. One step on one GPU narrows them.</p>",
        "<h2>Layouts</h2>", _table(shown), f'<p class="note">{len(advice.choices)} of {advice.num_layouts} layouts fit. Intervals hold 90 % of published rows like these.'
        + "".join(f" Assumed: {escape(note)}." for note in notes) + "</p>",
        *_target(ways, cluster.num_gpus), *_checkpoints(kept), "<h2>Frontier: throughput over memory</h2>", _frontier(advice),
        f"<h2>Memory of one GPU, GiB of {cluster.gpu.memory_gib:.1f}</h2>", _stacks(memory, limit=cluster.gpu.memory_gib),
        "<h2>Time of one step, s</h2>", _stacks(times), "<h2>Throughput by GPUs, with the 90 % band</h2>", _curve(seen), "</body></html>",
    ])  # fmt: skip


def _target(ways: Sequence[Way], num_gpus: int) -> list[str]:
    if not ways:
        return []
    head = "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in WAY_COLUMNS) + "</tr>"
    lines = [
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in way_cells(way)) + "</tr>"
        for way in shown_ways(ways, num_gpus)
    ]
    return [
        "<h2>Time to the target</h2>",
        f"<table>{head}{''.join(lines)}</table>",
        f'<p class="note">{escape(WAY_CAPTION)}</p>',
    ]


def _checkpoints(kept: CheckpointCost | None) -> list[str]:
    return (
        []
        if kept is None
        else [
            "<h2>Checkpoints and interruptions</h2>",
            *(f"<p>{escape(line.strip())}</p>" for line in checkpoint_lines(kept)),
        ]
    )


def _table(choices: Sequence[Choice]) -> str:
    head = "<tr><th>layout</th><th>step s</th><th>90 % interval</th><th>samples/s</th><th>MFU %</th><th>GiB</th><th>waits for communication %</th></tr>"
    lines = [
        f"<tr><td>{escape(one.layout.describe())}</td><td>{one.step_time_s.value:.3g}</td><td>{one.step_time_s.low:.3g} to {one.step_time_s.high:.3g}</td>"
        f"<td>{one.samples_per_s:.4g}</td><td>{100 * one.mfu:.1f}</td><td>{one.memory.device_bytes / GIB:.1f}{'' if one.fits == 'fits' else ' (may not fit)'}</td>"
        f"<td>{100 * one.step.exposed_comm_s / one.step.total_s:.0f}</td></tr>"
        for one in choices
    ]
    return f"<table>{head}{''.join(lines)}</table>"


def _stacks(rows: Sequence[tuple[str, dict[str, float]]], *, limit: float | None = None) -> str:
    names = list(rows[0][1])
    longest = max([sum(parts.values()) for _, parts in rows] + ([limit] if limit else []))
    left, width, high = 200, 740, 22
    drawn: list[str] = []
    for index, (label, parts) in enumerate(rows):
        y, x = 8 + index * (high + 6), float(left)
        drawn.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end" font-size="12">{escape(label)}</text>')
        for name, value in parts.items():
            wide = width * value / longest
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{high}" fill="{_colour(names, name)}"><title>{escape(name)} {value:.3g}</title></rect>'
            )
            x += wide
    bottom = 8 + len(rows) * (high + 6)
    if limit:
        x = left + width * limit / longest
        drawn.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}" stroke="#c00" stroke-width="2"><title>the card</title></line>'
        )
    for index, name in enumerate(names):
        x, y = left + (index % 5) * 150, bottom + 16 + (index // 5) * 18
        drawn.append(
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_colour(names, name)}"/><text x="{x + 14}" y="{y}" font-size="12">{escape(name)}</text>'
        )
    return _svg(960, bottom + 44, drawn)


def _frontier(advice: Advice) -> str:
    """Every choice as a point; those that no other beats in both throughput and memory are joined."""
    points = [(one.memory.device_bytes / GIB, one.samples_per_s, one.layout.describe()) for one in advice.choices]
    across, up = (0.0, max(x for x, _, _ in points)), (0.0, max(y for _, y, _ in points))
    drawn = _axes(across, up, "GiB", "samples/s")
    best: list[tuple[float, float]] = []
    for x, y, _ in sorted(points):
        if not best or y > best[-1][1]:
            best.append((x, y))
    drawn += [
        f'<circle cx="{_x(x, across):.1f}" cy="{_y(y, up):.1f}" r="3" fill="#3b6fb6" opacity="0.5"><title>{escape(text)}</title></circle>'
        for x, y, text in points
    ]
    drawn.append(f'<polyline fill="none" stroke="#e0913a" stroke-width="2" points="{_path(best, across, up)}"/>')
    return _svg(960, 360, drawn)


def _curve(seen: Outlook) -> str:
    if len(seen.points) < 2:
        return "<p>Only one size fits.</p>"
    points = [(math.log2(point.num_gpus), point.samples_per_s) for point in seen.points]
    across = (points[0][0], points[-1][0])
    # both axes in doublings: a curve that scales ideally is a straight line, and one that bends is seen to bend
    up = (math.log2(min(rate.low for _, rate in points)), math.log2(max(rate.high for _, rate in points)))
    band = [(x, math.log2(rate.low)) for x, rate in points] + [
        (x, math.log2(rate.high)) for x, rate in reversed(points)
    ]
    base = math.log2(points[0][1].value) - across[0]
    ideal = [(x, min(base + x, up[1])) for x, _ in points]
    drawn = _axes(across, up, "GPUs (each mark a doubling)", "samples/s", in_doublings=True)
    drawn.append(f'<polygon fill="#3b6fb6" opacity="0.18" points="{_path(band, across, up)}"/>')
    drawn.append(f'<polyline fill="none" stroke="#999" stroke-dasharray="5 4" points="{_path(ideal, across, up)}"/>')
    drawn.append(
        f'<polyline fill="none" stroke="#3b6fb6" stroke-width="2" points="{_path([(x, math.log2(rate.value)) for x, rate in points], across, up)}"/>'
    )
    for (x, rate), point in zip(points, seen.points, strict=True):
        drawn.append(
            f'<circle cx="{_x(x, across):.1f}" cy="{_y(math.log2(rate.value), up):.1f}" r="4" fill="#3b6fb6"><title>{point.num_gpus} GPUs: {escape(str(rate))}</title></circle>'
        )
        drawn.append(
            f'<text x="{_x(x, across):.1f}" y="322" text-anchor="middle" font-size="12">{point.num_gpus}</text>'
        )
    return _svg(960, 360, drawn)


def _axes(
    across: tuple[float, float], up: tuple[float, float], x_name: str, y_name: str, *, in_doublings: bool = False
) -> list[str]:
    marks = [up[0] + share * (up[1] - up[0]) for share in (0, 0.25, 0.5, 0.75, 1.0)]
    lines = [
        f'<line x1="80" x2="930" y1="{_y(y, up):.1f}" y2="{_y(y, up):.1f}" stroke="#8884"/><text x="72" y="{_y(y, up) + 4:.1f}" text-anchor="end" font-size="12">{2**y if in_doublings else y:.3g}</text>'
        for y in marks
    ]
    ends = (
        []
        if "GPUs" in x_name
        else [
            f'<text x="{_x(x, across):.1f}" y="322" text-anchor="middle" font-size="12">{x:.3g}</text>' for x in across
        ]
    )
    return [
        *lines,
        *ends,
        f'<text x="505" y="345" text-anchor="middle" font-size="12">{escape(x_name)}</text>',
        f'<text x="80" y="14" font-size="12">{escape(y_name)}</text>',
    ]


def _x(value: float, across: tuple[float, float]) -> float:
    return 80 + 850 * (value - across[0]) / ((across[1] - across[0]) or 1)


def _y(value: float, up: tuple[float, float]) -> float:
    return 300 - 275 * (value - up[0]) / ((up[1] - up[0]) or 1)


def _path(points: Sequence[tuple[float, float]], across: tuple[float, float], up: tuple[float, float]) -> str:
    return " ".join(f"{_x(x, across):.1f},{_y(y, up):.1f}" for x, y in points)


def _colour(names: Sequence[str], name: str) -> str:
    return COLOURS[names.index(name) % len(COLOURS)]


def _svg(width: int, height: int, drawn: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" font-family="system-ui,sans-serif">{"".join(drawn)}</svg>'
