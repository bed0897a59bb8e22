"""Style of all figures: colours, axes, labels at line ends, marks, and output as SVG and PNG.

Colours are those of Okabe and Ito (2008), which colour-blind readers can distinguish. Text from a config is drawn
literally, without math markup."""

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#AA4499", "#56B4E9"
INK, MUTED, GRID, PALE = "#1f2933", "#616e7c", "#e4e7eb", "#c3cad2"
PALETTE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
AMBER = "#8a4b00"

LEAST_CONTRAST = 4.5
"""Minimum contrast of text on white, as a ratio of luminances."""

WIDTH_IN, HEIGHT_IN = 5.0, 3.25
PNG_DPI = 200

STYLE: Any = {
    "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "scaleray", "font.family": "DejaVu Sans",
    "font.size": 9.0, "axes.edgecolor": PALE, "axes.labelcolor": MUTED, "axes.labelsize": 9.0, "axes.linewidth": 0.8,
    "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "grid.color": GRID,
    "grid.linewidth": 0.7, "xtick.color": PALE, "ytick.color": PALE, "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "xtick.major.size": 3,
    "ytick.major.size": 3, "xtick.minor.size": 0, "ytick.minor.size": 0,
    "lines.linewidth": 1.8, "lines.markersize": 5.5, "lines.solid_capstyle": "round", "text.color": INK,
    "figure.constrained_layout.use": True, "figure.facecolor": "white", "legend.frameon": False, "legend.fontsize": 8.5,
    "path.simplify": True, "path.simplify_threshold": 0.5,
}  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """A finished figure. name: stem of its file name. caption: its description. svg: the element for a page. png:
    returns the file's bytes."""

    name: str
    title: str
    caption: str
    svg: str
    png: Callable[[], bytes]
    is_wide: bool = False


@contextmanager
def style() -> Iterator[None]:
    """Context with the style of all figures; matplotlib's style is unchanged for other code in this process."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def draw(
    name: str,
    title: str,
    caption: str,
    paint: Callable[[Any], None],
    *,
    marks: Sequence[str] = (),
    columns: int = 1,
    is_wide: bool = False,
    height_in: float = HEIGHT_IN,
    share_y: bool = False,
) -> Drawing:
    """Paint axes and return them as SVG and PNG. marks: conditions that the reader must see. paint: receives the axes,
    or a list of them for several columns. is_wide: whether to fill the page's width."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(WIDTH_IN * (2.05 if is_wide else 1), height_in))
        axes = figure.subplots(1, columns, squeeze=False, sharey=share_y)[0]
        paint(axes[0] if columns == 1 else list(axes))
        if marks:
            figure.suptitle(" · ".join(marks), x=0.995, ha="right", fontsize=8, color=AMBER, fontweight="bold")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # it is laid out: neither file needs that again
        vector = io.StringIO()
        figure.savefig(vector, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    label = f"{title}. {caption}" + (f" Marks: {', '.join(marks)}." if marks else "")
    svg = inline(vector.getvalue(), name=name, label=label)
    return Drawing(name, title, caption, svg, lambda: _pixels(figure), is_wide)


def inline(svg: str, *, name: str, label: str) -> str:
    """An SVG file as an element of a page: without a header, with unique ids and a text alternative."""
    import html

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # ids must be unique in a page, and two figures may have drawn the same things
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    head = f'<svg role="img" aria-label="{html.escape(label, quote=True)}"'
    return svg.replace("<svg", head, 1).strip()


def log2_axis(axis: Any, values: Sequence[float], *, most: int = 9) -> None:
    """Make an axis logarithmic to base 2, with ticks at `values` as plain numbers, thinned to `most`. axis: ax.xaxis or
    ax.yaxis."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    chosen = sorted(set(values))
    while len(chosen) > most:
        chosen = chosen[::2]
    _set_scale(axis, "log", base=2)
    axis.set_major_locator(FixedLocator(chosen))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: number(v)))


def log_axis(axis: Any, *, show: Callable[[float], str] | None = None) -> None:
    """Make an axis logarithmic to base 10, with plain numbers, more of them on a short range."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    _set_scale(axis, "log", base=10)
    low, high = axis.get_view_interval()
    decades = abs(_log10(high) - _log10(low))
    axis.set_major_locator(LogLocator(base=10, subs=_subs(decades), numticks=14))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: (show or number)(v)))


def plain_axis(axis: Any, *, show: Callable[[float], str] | None = None, most: int = 6) -> None:
    """Make an axis linear, with few ticks and plain numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda v, _: (show or number)(v)))


def number(value: float) -> str:
    """A number in short form, such as 0.003, 128, 16k or 2M."""
    if value == 0:
        return "0"
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.4g}{suffix}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")


def label_ends(ax: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Label lines at their right ends, in their colour, and move labels apart if they would overlap.

    ends: (x, y, text, colour) in data coordinates. Call this last, when the axes' limits are final.
    """
    if not ends:
        return
    figure = ax.figure
    figure.draw_without_rendering()  # the layout decides where the axes are
    frame, line_px = ax.get_window_extent(), 11.5 / 72 * figure.dpi
    placed: list[tuple[float, float]] = []
    for x, y, text, colour in sorted(ends, key=lambda end: end[1], reverse=True):
        x_px, y_px = ax.transData.transform((x, y))
        width_px = 0.62 * 8.5 / 72 * figure.dpi * max(3, len(text)) + 10
        at = min(y_px, frame.y1)
        for other_x, other_y in sorted(placed, key=lambda place: place[1], reverse=True):
            if abs(x_px - other_x) < width_px and abs(at - other_y) < line_px:
                at = other_y - line_px
        placed.append((x_px, at))
        ax.annotate(
            text,
            (x, y),
            xytext=(7, (at - y_px) * 72 / figure.dpi),
            textcoords="offset points",
            va="center",
            ha="left",
            fontsize=8.5,
            color=readable(colour),
            annotation_clip=False,
        )


def readable(colour: str) -> str:
    """The colour, darkened until its contrast as text on white is LEAST_CONTRAST (WCAG 2.1, criterion 1.4.3)."""
    from matplotlib.colors import to_hex, to_rgb

    rgb = to_rgb(colour)
    while 1.05 / (_luminance(rgb) + 0.05) < LEAST_CONTRAST:
        rgb = (rgb[0] * 0.95, rgb[1] * 0.95, rgb[2] * 0.95)
    return to_hex(rgb)


def legend_right(ax: Any, title: str, **more: Any) -> None:
    """Place the legend to the right of the axes, where it covers no data."""
    ax.legend(title=title, title_fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.2, **more)


def colours_of(names: Sequence[str]) -> Mapping[str, str]:
    """A colour for each name, the same in all figures of a page that pass the same names."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}


def shades(count: int) -> list[str]:
    """`count` colours from light to dark for ordered values, whose order is visible even without colour."""
    import matplotlib
    from matplotlib.colors import to_hex

    scale = matplotlib.colormaps["viridis"]
    return [to_hex(scale(0.78 - 0.76 * i / max(1, count - 1))) for i in range(count)]


def _luminance(rgb: tuple[float, float, float]) -> float:
    """Relative luminance of sRGB, as WCAG defines it."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _pixels(figure: Any) -> bytes:
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="png", dpi=PNG_DPI)
    return buffer.getvalue()


def _set_scale(axis: Any, scale: str, *, base: int) -> None:
    (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)(scale, base=base)


def _subs(decades: float) -> tuple[float, ...]:
    if decades < 0.8:
        return (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    return (1.0, 2.0, 3.0, 5.0) if decades < 1.3 else (1.0, 2.0, 5.0) if decades < 2.2 else (1.0,)


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else 0.0
