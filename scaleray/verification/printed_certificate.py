"""Print a verification: one line per variant, then an explanation of each mismatch, then the verdict."""

from __future__ import annotations

import io
import math
import shlex
import textwrap
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from scaleray.records.certificate import Mismatch, Outcome
from scaleray.records.terminal.terminal_tables import as_rich
from scaleray.records.text.study_sweep_tables import Table

if TYPE_CHECKING:
    from scaleray.records.certificate import EqualityCertificate

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
    "masks": "the dropout mask",
    "restored parameters": "the restored value",
    "restored state": "the restored state",
    "averaging": "the result of the replicas' exchange",
    "own gradient": "a replica's own gradient",
    "sent gradient": "the gradient that was sent",
    "evaluation": "the measured value",
}
"""Names of diverging quantities, as used in a sentence."""
PLURAL = {"rows"}


def table(certificate: EqualityCertificate, *, width: int) -> RenderableType:
    """Table of each variant's differences from one process, in the check's and in the run's own precision, for `width`
    columns."""
    own = certificate.own_precision
    title = (
        f"{certificate.workload}: {certificate.steps} steps of {certificate.global_batch_size} samples, "
        f"{certificate.precision}, bound {certificate.bound:g}"
    )
    columns = (
        "strategy",
        "workers",
        "micro-batches",
        "loss",
        "gradient norm",
        "final values",
        f"loss in {own}",
        "verdict",
    )
    judged = [outcome for outcome in certificate.outcomes if outcome.verdict != "refused"]
    rows = tuple(
        (
            one.layout or one.strategy,
            str(one.world_size),
            str(one.accumulation),
            _figure(one.comparison.loss),
            _figure(one.comparison.grad_norm),
            _figure(one.comparison.parameters),
            _figure(one.own.loss if one.own else math.nan),
            _verdict(one),
        )
        for one in judged
    )
    note = f"Relative differences from one process. In {own}, all steps start from the initial parameters."
    styles = ["red" if one.verdict == "differs" else "" for one in judged]
    return as_rich(Table(title, columns, rows, (note,)), width=width, styles=styles)


def lines(certificate: EqualityCertificate) -> list[str]:
    """Lines below the table: mismatches, notes on comparisons, variants that did not run, and the verdict."""
    found = []
    for outcome in certificate.outcomes:
        if outcome.mismatch is not None:
            found += mismatch_lines(outcome, outcome.mismatch)
    notes = dict.fromkeys(o.words for o in certificate.outcomes if o.words and o.verdict != "refused")
    found += [f"note: {note}" for note in notes]
    for outcome in certificate.outcomes:
        if outcome.verdict == "refused":
            found.append(f"not run: {outcome.label}: {outcome.words}")
    found.append(f"{certificate.verdict} ({certificate.duration_s:.0f} s, {certificate.where})")
    if certificate.tracking_uri.startswith("http"):
        found.append(f"MLflow:       {certificate.mlflow_link}")
    else:
        uri = shlex.quote(certificate.tracking_uri)
        found.append(f"MLflow:       scaleray tracking ui --uri {uri}   then open {certificate.mlflow_link}")
    found.append(f"certificate:  {certificate.run_dir}/certificate.json")
    return found


def mismatch_lines(outcome: Outcome, mismatch: Mismatch) -> list[str]:
    """Lines with a variant's first difference, the class of its cause, and an explanation."""
    where = f"at step {mismatch.step}" if mismatch.step else "before the first step"
    what = QUANTITIES.get(mismatch.quantity, f"the {mismatch.quantity}")
    what += f" of {mismatch.parameter}" if mismatch.parameter is not None else ""
    verb = "differ" if mismatch.quantity in PLURAL and mismatch.parameter is None else "differs"
    size = f" by {mismatch.difference:.1e}" if math.isfinite(mismatch.difference) else ""
    first = f"{outcome.label}: {mismatch.cause}. First {where}: {what} {verb}{size}."
    return [first, *textwrap.wrap(mismatch.why, WIDTH, initial_indent="  ", subsequent_indent="  ")]


def as_text(certificate: EqualityCertificate) -> str:
    """Table and lines as plain text, for a file."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=WIDTH, color_system=None)
    console.print(table(certificate, width=WIDTH))
    for line in lines(certificate):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return buffer.getvalue()


def _verdict(outcome: Outcome) -> str:
    if outcome.mismatch is not None:
        return f"differs: {outcome.mismatch.cause}"
    if outcome.verdict == "equal" and outcome.world_size == outcome.accumulation == 1:
        return "repeats itself to the bit" if outcome.comparison.largest == 0 else "repeats itself"
    return outcome.verdict


def _figure(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1e}" if value else "0"
