"""A verification on the terminal: one line a variant, then words for each mismatch, then the verdict."""

from __future__ import annotations

import io
import math
import textwrap

from rich import box
from rich.console import Console
from rich.table import Table

from scaleray.launch.certificate import EqualityCertificate
from scaleray.training.verification import Mismatch, Outcome

WIDTH = 110
QUANTITIES = {
    "count": "the count of the loss",
    "dtype": "the type",
    "initial parameters": "the initial value",
    "parameters": "the new value",
    "final values": "the final value",
    "gradient": "the gradient",
    "run": "the outcome",
    "steps": "the number of steps",
    "random state": "what ranks draw",
}
"""What a divergence's quantity is called in a sentence."""
PLURAL = {"rows"}


def table(certificate: EqualityCertificate) -> Table:
    """Differences of every variant to one process, in the precision of the check and in the run's own."""
    own = certificate.own_precision
    made = Table(
        title=f"{certificate.workload}: {certificate.steps} steps of {certificate.global_batch_size} samples, "
        f"{certificate.precision}, bound {certificate.bound:g}",
        caption=f"relative differences to one process; in {own} for information, with the model as it is",
        box=box.SIMPLE,
        padding=(0, 1),
        title_justify="left",
        caption_justify="left",
    )
    for name in (
        "strategy",
        "workers",
        "micro-\nbatches",
        "loss",
        "gradient\nnorm",
        "final\nvalues",
        f"loss\nin {own}",
    ):
        made.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    made.add_column("verdict")
    for outcome in certificate.outcomes:
        if outcome.verdict == "refused":
            continue
        c = outcome.comparison
        made.add_row(
            outcome.strategy, str(outcome.world_size), str(outcome.accumulation), _figure(c.loss), _figure(c.grad_norm),
            _figure(c.parameters), _figure(outcome.own.loss if outcome.own else math.nan), _verdict(outcome),
            style="red" if outcome.verdict == "differs" else "",
        )  # fmt: skip
    return made


def lines(certificate: EqualityCertificate) -> list[str]:
    """What stands below the table: mismatches, what was judged with something taken out, what was not run, the verdict."""
    found = []
    for outcome in certificate.outcomes:
        if outcome.mismatch is not None:
            found += mismatch_lines(outcome, outcome.mismatch)
    notes = dict.fromkeys(o.words for o in certificate.outcomes if o.words and o.verdict != "refused")
    found += [f"note: {note}" for note in notes]
    for outcome in certificate.outcomes:
        if outcome.verdict == "refused":
            found.append(f"not run: {_label(outcome)}: {outcome.words}")
    found.append(f"{certificate.verdict} ({certificate.duration_s:.0f} s, {certificate.where})")
    if certificate.tracking_uri.startswith("http"):
        found.append(f"MLflow:       {certificate.mlflow_link}")
    else:
        found.append(
            f"MLflow:       scaleray tracking ui --uri {certificate.tracking_uri}   then open {certificate.mlflow_link}"
        )
    found.append(f"certificate:  {certificate.run_dir}/certificate.json")
    return found


def mismatch_lines(outcome: Outcome, mismatch: Mismatch) -> list[str]:
    """Where a variant first differs, of which class that is, and why it is thought so."""
    where = f"at step {mismatch.step}" if mismatch.step else "before the first step"
    what = QUANTITIES.get(mismatch.quantity, f"the {mismatch.quantity}")
    what += f" of {mismatch.parameter}" if mismatch.parameter is not None else ""
    verb = "differ" if mismatch.quantity in PLURAL and mismatch.parameter is None else "differs"
    size = f" by {mismatch.difference:.1e}" if math.isfinite(mismatch.difference) else ""
    first = f"{_label(outcome)}: {mismatch.cause}. First {where}: {what} {verb}{size}."
    return [first, *textwrap.wrap(mismatch.why, WIDTH, initial_indent="  ", subsequent_indent="  ")]


def as_text(certificate: EqualityCertificate) -> str:
    """Table and lines as plain text, for a file."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=WIDTH, color_system=None)
    console.print(table(certificate))
    for line in lines(certificate):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return buffer.getvalue()


def _label(outcome: Outcome) -> str:
    more = f", {outcome.accumulation} micro-batches" if outcome.accumulation > 1 else ""
    return f"{outcome.strategy} x {outcome.world_size}{more}"


def _verdict(outcome: Outcome) -> str:
    if outcome.mismatch is not None:
        return f"differs: {outcome.mismatch.cause}"
    if outcome.verdict == "equal" and outcome.world_size == outcome.accumulation == 1:
        return "repeats itself to the bit" if outcome.comparison.largest == 0 else "repeats itself"
    return outcome.verdict


def _figure(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1e}" if value else "0"
