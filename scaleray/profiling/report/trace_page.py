"""Report of traces, as tables for a terminal and as a page: ranks, modules, operators, launches, memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scaleray.common.printed import quantity
from scaleray.profiling.traces.memory_blocks import CATEGORIES, MemorySnapshot
from scaleray.profiling.traces.trace_report import RankTrace, TraceReport
from scaleray.records.page.drawing import BLUE, GREEN, GRID, ORANGE, PALE, PURPLE, SKY, VERMILION, Drawing, draw
from scaleray.records.page.page import Fact, Page, Section, write
from scaleray.records.text.study_sweep_tables import Table, sentence_case
from scaleray.records.text.units import disk_space, memory

PARTS = ("compute", "exposed communication", "copies", "host idle", "other idle")
PART_COLOURS = (BLUE, VERMILION, ORANGE, PALE, GRID)
CATEGORY_COLOURS = dict(zip(CATEGORIES, (BLUE, GREEN, PURPLE, SKY), strict=True))
NOT_KNOWN = "n/a"
LONGEST_NAME = 60
MOST_DRAWN_SEGMENTS = 40


def trace_tables(report: TraceReport) -> list[Table]:
    """Tables of a trace: one for all ranks, and details of the slowest rank."""
    tables = [_ranks(report)]
    slowest = slowest_of(report)
    title = f"a step of rank {slowest.rank}" if len(report.ranks) > 1 else "of a step"
    if slowest.modules:
        tables.append(_modules(slowest, title))
    if slowest.operators:
        tables.append(_operators(slowest, title))
    if any(rank.launches for rank in report.ranks):
        tables.append(_launches(report))
    return tables


def kernel_table(rank: RankTrace) -> Table:
    """Kernels with the most time."""
    rows = [(_short(each.name), str(each.count), _ms(each.device_ns, rank)) for each in rank.kernels]
    return Table(f"Kernels of rank {rank.rank}, per step", ("kernel", "calls in total", "device"), tuple(rows))


def memory_tables(snapshots: Sequence[MemorySnapshot]) -> list[Table]:
    """Tables on the use of each device's memory, and its unused part."""
    if not snapshots:
        return []
    columns = ("rank", "in use", "rounding", "cached", "stranded", "largest hole", "fragmentation")
    rows = [
        (
            _rank_of(each.rank),
            memory(each.active_bytes),
            disk_space(each.rounding_bytes),
            memory(each.cached_bytes),
            memory(each.stranded_bytes),
            memory(each.largest_hole_bytes),
            _share(each.fragmentation),
        )
        for each in snapshots
    ]
    notes = ["rounding: in use beyond the requested size; stranded: cached parts of segments that cannot be returned"]
    if any(each.is_expandable for each in snapshots):
        notes.append("segments can grow (expandable_segments), so nothing in them counts as stranded")
    categories = [
        (_rank_of(each.rank), name, memory(size), _share(size / each.active_bytes))
        for each in snapshots
        for name, size in each.by_category().items()
    ]
    return [
        Table("Memory of the device", columns, tuple(rows), tuple(notes)),
        Table("Memory in use, by purpose", ("rank", "for", "size", "share"), tuple(categories)),
    ]


def slowest_of(report: TraceReport) -> RankTrace:
    """The rank for which the others wait: the last to arrive at collectives, or the rank with the least exposed
    communication."""
    if report.late_ns:
        last = max(report.late_ns, key=lambda rank: report.late_ns[rank])
        return next(rank for rank in report.ranks if rank.rank == last)
    return min(report.ranks, key=lambda rank: rank.partition.exposed_communication_ns)


def write_trace_page(
    report: TraceReport | None, snapshots: Sequence[MemorySnapshot], folder: str | Path, *, name: str
) -> Path:
    """Write report.html with its figures into the folder of the traces; return its path."""
    return write(trace_page(report, snapshots, name=name), folder, rows={})[0]


def trace_page(report: TraceReport | None, snapshots: Sequence[MemorySnapshot], *, name: str) -> Page:
    """Page of traces and memory snapshots."""
    sections: list[Section] = []
    figures: list[Fact] = []
    headline = ""
    if report is not None:
        tables, slowest = trace_tables(report), slowest_of(report)
        headline = sentence_case(sentence(report))
        kernels = [kernel_table(slowest)] if slowest.kernels else []
        sections.append(Section("Where the steps went", drawings=[_bars(report)], tables=[*tables, *kernels]))
        figures = [
            Fact("Step", _ms(slowest.partition.total_ns, slowest), f"mean of {slowest.partition.num_steps} traced"),
            Fact("Overlap", _share(slowest.overlap), "of communication overlaps with computing"),
            Fact("MFU", _share(slowest.mfu), "of the dense peak"),
        ]
    if snapshots:
        drawings = [_map(snapshot) for snapshot in snapshots]
        sections.append(Section("Memory", drawings=drawings, tables=memory_tables(snapshots)))
        headline = headline or "Use of the memory"
    count = len(report.ranks) if report is not None else len(snapshots)
    when = quantity(count, "rank")
    return Page(kind="Trace", name=name, when=when, headline=headline, figures=figures, sections=sections)


def sentence(report: TraceReport) -> str:
    """Sentence on the largest part of the slowest rank's steps."""
    slowest = slowest_of(report)
    parts = {part: value or 0 for part, value in slowest.partition.parts.items()}
    largest = max(parts, key=lambda part: parts[part])
    share = parts[largest] / slowest.partition.total_ns
    return f"{largest} takes {100 * share:.0f} % of a step on rank {slowest.rank}"


def _ranks(report: TraceReport) -> Table:
    several = len(report.ranks) > 1
    columns = ("rank", "device", "step", *PARTS, "overlap", "MFU", *(("comes late by",) if several else ()))
    rows = []
    for each in report.ranks:
        parts = [_part(each.partition.parts[part], each) for part in PARTS]
        late = [_us(report.late_ns.get(each.rank))] if several else []
        rows.append(
            (
                str(each.rank),
                each.device,
                _ms(each.partition.total_ns, each),
                *parts,
                _share(each.overlap),
                _share(each.mfu),
                *late,
            )
        )
    steps = report.ranks[0].steps
    worst = max(rank.partition.closes_within for rank in report.ranks)
    notes = [f"parts sum to the steps within {100 * worst:.2g} %"]
    if several:
        joined = "NCCL's sequence numbers" if report.by_sequence else "call order"
        notes.append(f"{report.num_meetings} collectives matched by {joined}; clocks aligned by {_clocks(report)}")
    traced = f"{len(report.ranks)} of {report.world_size} ranks" if report.world_size else "one process"
    title = f"{traced}, mean of {len(steps)} traced steps" if len(steps) > 1 else f"{traced}, one traced step"
    return Table(title, columns, tuple(rows), tuple(notes))


def _clocks(report: TraceReport) -> str:
    within = max(report.clocks.within_ns.values(), default=0)
    return f"{report.clocks.found_from}, within {_us(within)}" if report.clocks.within_ns else report.clocks.found_from


def _modules(rank: RankTrace, title: str) -> Table:
    rows = [
        (
            each.name,
            _ms(each.compute_ns, rank),
            _share(each.compute_ns / rank.partition.total_ns),
            NOT_KNOWN if not each.flops else f"{each.flops / rank.partition.num_steps / 1e9:.3g}",
            _share(each.mfu),
        )
        for each in rank.modules
    ]
    return Table(f"Modules {title}", ("module", "compute", "of the step", "GFLOP", "MFU"), tuple(rows))


def _operators(rank: RankTrace, title: str) -> Table:
    steps = rank.partition.num_steps
    rows = [
        (_short(each.name), f"{each.count / steps:g}", _ms(each.host_ns, rank), _ms(each.device_ns, rank))
        for each in rank.operators
    ]
    return Table(f"Operators {title}", ("operator", "calls", "host, own", "device"), tuple(rows))


def _launches(report: TraceReport) -> Table:
    rows = []
    for each in report.ranks:
        if (found := each.launches) is not None:
            queue = max(each.queues, key=lambda queue: queue.longest)
            host = sum(pause.host_ns for pause in each.pauses)
            rows.append(
                (
                    str(each.rank),
                    str(found.count),
                    _us(found.delay_median_ns),
                    _us(found.delay_p90_ns),
                    str(found.slow_calls),
                    str(found.short_kernels),
                    f"{queue.mean:.1f}, at most {queue.longest}",
                    _ms(host, each),
                )
            )
    columns = ("rank", "launches", "delay", "p90", "calls > 50 us", "kernels < call", "queue", "streams wait for host")
    return Table("Launches", columns, tuple(rows))


def _bars(report: TraceReport) -> Drawing:
    ranks = report.ranks

    def paint(ax: Any) -> None:
        left = [0.0] * len(ranks)
        for part, colour in zip(PARTS, PART_COLOURS, strict=True):
            widths = [(each.partition.parts[part] or 0) / each.partition.num_steps / 1e6 for each in ranks]
            if any(widths):
                ax.barh(range(len(ranks)), widths, left=left, color=colour, label=part, height=0.6)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        ax.set_yticks(range(len(ranks)), [f"rank {each.rank}" for each in ranks])
        ax.invert_yaxis()
        ax.set_xlabel("milliseconds of a step")
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35 / max(1, 0.2 * len(ranks) + 0.8)), ncols=5)

    caption = "Parts of a traced step on each rank; where several overlap, the first in the legend counts."
    return draw("trace-parts", "Parts of a step", caption, paint, is_wide=True, height_in=1.7 + 0.35 * len(ranks))


def _map(snapshot: MemorySnapshot) -> Drawing:
    """Drawing of every segment as a row of its blocks, largest segments first."""
    segments = sorted(snapshot.segments, key=lambda blocks: -sum(block.size for block in blocks))[:MOST_DRAWN_SEGMENTS]

    def paint(ax: Any) -> None:
        labelled: set[str] = set()
        for row, blocks in enumerate(segments):
            at = 0.0
            for block in blocks:
                what = block.category or "unused"
                label = what if what not in labelled else None
                labelled.add(what)
                colour = CATEGORY_COLOURS.get(what, GRID)
                ax.barh(row, block.size / 2**20, left=at, color=colour, label=label, height=0.85)
                at += block.size / 2**20
        ax.set_yticks([])
        ax.invert_yaxis()
        ax.set_xlabel("MiB of a segment")
        ax.legend(loc="lower right")

    left_out = len(snapshot.segments) - len(segments)
    caption = "Segments of the allocator, largest first, and the use of their blocks." + (
        f" {left_out} smaller ones are omitted." if left_out else ""
    )
    name = f"memory-rank{snapshot.rank if snapshot.rank is not None else ''}"
    height = 1.4 + 0.13 * len(segments)
    return draw(name, f"Memory of rank {_rank_of(snapshot.rank)}", caption, paint, is_wide=True, height_in=height)


def _rank_of(rank: int | None) -> str:
    return NOT_KNOWN if rank is None else str(rank)


def _part(value: int | None, rank: RankTrace) -> str:
    return NOT_KNOWN if value is None else f"{_ms(value, rank)} ({100 * value / rank.partition.total_ns:.0f} %)"


def _ms(value: int | None, rank: RankTrace) -> str:
    """Nanoseconds over all traced steps, shown as milliseconds per step."""
    return NOT_KNOWN if value is None else f"{value / rank.partition.num_steps / 1e6:.3g} ms"


def _us(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value / 1e3:.3g} us"


def _share(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{100 * value:.1f} %"


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."
