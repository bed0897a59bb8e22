"""Sources of the planner's values, and reasons for dropped layouts, as lines of text."""

import inspect
import math
import re
import textwrap
from collections import Counter

from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.config.hardware.hardware_kinds import TRANSPORTS
from scaleray.errors import UsageError
from scaleray.planner.answers.advise import HEADROOM
from scaleray.planner.answers.layouts import layouts
from scaleray.planner.answers.plan_question import Question
from scaleray.planner.cost.constants import DEFAULT, FITTED, Constants
from scaleray.planner.cost.memory import memory
from scaleray.planner.cost.uncertainty import (
    OF_A_DOUBLING,
    OF_A_GPU,
    OF_A_LAYOUT,
    OF_A_MICRO_BATCH,
    OF_A_NETWORK,
    SPREADS,
    is_trusted,
)
from scaleray.records.text.units import GIB


def explain_constants() -> list[str]:
    """All constants with their values and explanations."""
    source = inspect.getsource(Constants)
    lines = ["the planner's constants; `python -m jobs.planner_evidence fit DATA` refits the fitted ones", ""]
    for name in Constants.__dataclass_fields__:
        match = re.search(rf'    {name}: float = [^\n]+\n    """(.*?)"""', source, re.DOTALL)
        reason = " ".join(match[1].split()) if match else ""
        mark = "fitted" if name in FITTED else "given"
        lines.append(f"{name} = {getattr(DEFAULT, name):.6g}  ({mark})")
        lines += textwrap.wrap(
            reason.removeprefix("fitted. "), width=108, initial_indent="    ", subsequent_indent="    "
        )
    return lines


def explain_intervals() -> list[str]:
    """All classes of intervals with their ranges."""
    lines = ["90 % of published rows of each class lie between these factors of the prediction", ""]
    for kind, spread in SPREADS.items():
        low, high = math.exp(spread.low), math.exp(spread.high)
        lines.append(
            f"{kind:<24} {low:.2f} to {high:.2f}  from {spread.num_rows} rows"
            f"{'' if is_trusted(kind) else '; do not rely on a single figure'}"
        )
    lines += ["", "`anchored`: the interval near the measured point. Each difference widens it, added in quadrature:"]
    for words, (down, up) in {
        "each doubling of the GPUs beyond 1.5": OF_A_DOUBLING,
        "another layout": OF_A_LAYOUT,
        "each doubling of the micro-batch beyond the first": OF_A_MICRO_BATCH,
        "another type of GPU": OF_A_GPU,
    }.items():
        lines.append(f"  {words:<52} {math.exp(-down):.2f} to {math.exp(up):.2f}")
    lines.append(
        f"  {'a network that was not measured':<52} its share of the step off by a factor of {OF_A_NETWORK:.2g}"
    )
    return lines


def explain_hardware(name: str) -> list[str]:
    """Return a GPU, link or network with its source. Raises UsageError for an unknown name."""
    for find in (CATALOGUE.find_gpu, CATALOGUE.find_link, CATALOGUE.find_network):
        try:
            entry = find(name)
        except UsageError:
            continue
        lines = [f"{key} = {value}" for key, value in entry.__dict__.items() if key != "source"]
        transport = TRANSPORTS.get(getattr(entry, "transport", ""))
        if transport is not None:
            lines += [f"transport.{key} = {value}" for key, value in transport.__dict__.items()]
        return [*lines, f"source: {entry.source}"]
    raise UsageError("WHAT", name, "it must be constants, intervals, layouts, or the name of a GPU, link or network")


def explain_layouts(question: Question, *, rows: int) -> list[str]:
    """List the layouts that do not fit, closest first, with their memory by part, and the number of each kind."""
    dropped, kept = [], Counter[str]()
    for layout in layouts(question):
        needed = memory(question.model, layout)
        missing = HEADROOM * question.cluster.gpu.memory_gib - needed.spare_bytes(question.cluster.gpu) / GIB
        if missing > 0:
            dropped.append((missing, layout, needed))
        else:
            kept[layout.strategy] += 1
    lost = Counter(layout.strategy for _, layout, _ in dropped)
    lines = [f"{name}: {kept[name]} layouts fit, {lost[name]} do not" for name in sorted({*kept, *lost})]
    lines += [
        "",
        f"closest to fitting on {question.cluster.gpu.memory_gib:.1f} GiB, "
        f"of which {100 * HEADROOM:.0f} % must stay free:",
    ]
    for missing, layout, needed in sorted(dropped, key=lambda one: one[0])[:rows]:
        parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in needed.parts().items() if value > 0.05 * GIB)
        lines.append(f"{missing:8.1f} GiB too much: {layout.describe()}: {parts}")
    return lines
