"""A table for a terminal of any width, which loses no figure and no column, however narrow the terminal is.

Intervals are next to their values if there is room, otherwise below them. Columns that still do not fit continue in
another block below, which repeats the first column. Text is wrapped between words; figures are never wrapped.
"""

import itertools
import textwrap
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from scaleray.records.text.study_sweep_tables import Table

MOST_ROWS = 40
NARROWEST_WORDS = 16
"""Minimum width for words before a table is split into blocks, unless the words are shorter."""


def as_rich(table: Table, *, width: int, styles: Sequence[str] = ()) -> RenderableType:
    """The table with its notes below, for a console of `width` columns. styles: rich's names, one for each row."""
    rows = table.rows[:MOST_ROWS]
    beside = [list(row) for row in rows]
    below = [[cell if table.is_text(n) else cell.replace(" (", "\n(") for n, cell in enumerate(row)] for row in rows]
    notes = list(table.notes)
    if len(table.rows) > MOST_ROWS:
        notes.append(f"{len(table.rows) - MOST_ROWS} more rows are in the report.")
    every = list(range(len(table.columns)))
    # the roomiest way that fits: intervals beside their values, then below them, then with less air between columns,
    # then in blocks
    ways = [
        (beside, _whole_widths(table, beside), 2),
        (below, _whole_widths(table, below), 2),
        *((below, _least_widths(table, below), air) for air in (2, 1)),
    ]
    folded = (below, _least_widths(table, below, longest_word=NARROWEST_WORDS), 1)
    cells, widths, air = next((way for way in [*ways, folded] if _total(way[1], every, way[2]) <= width), ways[-1])
    made: list[RenderableType] = []
    for number, block in enumerate(_blocks(widths, air, width)):
        title = table.title if not number else f"{table.title}, continued" if table.title else ""
        made.append(_block(table, cells, widths, block, air=air, width=width, title=title, styles=styles))
    # not the table's caption, which would be as narrow as the table
    return Group(*made, *(Text(note, style="dim") for note in notes))


def _block(
    table: Table,
    cells: Sequence[Sequence[str]],
    widths: Sequence[int],
    block: Sequence[int],
    *,
    air: int,
    width: int,
    title: str,
    styles: Sequence[str],
) -> RichTable:
    made = RichTable(
        title=Text(title, style="bold") if title else None,
        box=box.SIMPLE,
        padding=(0, air - 1, 0, air - 1),
        title_justify="left",
    )
    # what is left over goes to the words
    texts = [n for n in block if table.is_text(n)]
    spare = width - _total(widths, block, air)
    for n in block:
        wanted = _widest(cells, n)
        own = min(wanted, widths[n] + max(0, spare)) if n in texts else widths[n]
        own = max(own, widths[n])
        spare -= own - widths[n]
        heading = Text(textwrap.fill(table.columns[n], own, break_long_words=False))
        made.add_column(heading, justify="left" if n == block[0] or n in texts else "right", width=own, overflow="fold")
    for row, style in itertools.zip_longest(cells, styles[: len(cells)], fillvalue=""):
        made.add_row(*(Text(row[n]) for n in block), style=style)
    return made


def _whole_widths(table: Table, cells: Sequence[Sequence[str]]) -> list[int]:
    """Widths of columns in which only headings are wrapped."""
    return [max(_widest(cells, n), _longest_word(column)) for n, column in enumerate(table.columns)]


def _least_widths(table: Table, cells: Sequence[Sequence[str]], longest_word: int | None = None) -> list[int]:
    """Smallest readable widths of columns with wrapped words. longest_word: characters above which a word is folded."""
    found = []
    for n, column in enumerate(table.columns):
        words = max((_longest_word(row[n]) for row in cells), default=0)
        words = words if longest_word is None else min(words, longest_word)
        least = max(words, min(NARROWEST_WORDS, _widest(cells, n))) if table.is_text(n) else _widest(cells, n)
        found.append(max(least, _longest_word(column.replace("-", "- "))))
    return found


def _blocks(widths: Sequence[int], air: int, width: int) -> Iterator[list[int]]:
    """Groups of columns that fit next to each other; every group includes the first column."""
    block = [0]
    for n in range(1, len(widths)):
        if len(block) > 1 and _total(widths, [*block, n], air) > width:
            yield block
            block = [0]
        block.append(n)
    yield block


def _total(widths: Sequence[int], block: Sequence[int], air: int) -> int:
    """Width of a block, with a space on each side of the table and between cells, and padding around each cell."""
    return sum(widths[n] for n in block) + len(block) * (2 * air - 1) + 1


def _widest(cells: Sequence[Sequence[str]], column: int) -> int:
    return max(itertools.chain((0,), (len(line) for row in cells for line in row[column].splitlines())))


def _longest_word(text: str) -> int:
    return max((len(word) for word in text.split()), default=0)
