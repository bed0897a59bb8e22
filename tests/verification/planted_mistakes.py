"""The whole table of planted mistakes, and how `scaleray verify` is asked about each.

`python tests/verification/planted_mistakes.py` prints what verify says about them, and how many it found and named rightly.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import planted_by_a_reader  # noqa: F401 - they enter themselves into the table
import planted_elsewhere  # noqa: F401
import planted_in_gradients  # noqa: F401
import planted_in_layouts  # noqa: F401
import planted_in_state  # noqa: F401
from planted_edits import PLANTED, Planted
from small_runs import DEFAULTS
from verified import knows_who_trains

from scaleray.config import load_config
from scaleray.data import as_source
from scaleray.records.certificate import Outcome
from scaleray.training.setup.rank_context import RankContext
from scaleray.verification.variants import Assignment, verify_group
from scaleray.verification.verification_plan import make_plan
from scaleray.verification.verify_options import VerifyOptions

STEPS = 20
FLAGS: dict[str, Any] = {
    **DEFAULTS, "batch.global_size": 48, "precision.dtype": "fp32", "stop.after": "4 epochs", "optimizer.momentum": 0.9, "optimizer.clip_norm": 1.0,
    "schedule.name": "cosine", "schedule.warmup": "5 steps",
}  # fmt: skip


def judge_planted(
    place: RankContext, name: str, *, steps: int = STEPS, accumulation: Sequence[int] = ()
) -> list[Outcome]:
    """What verify says about a mistake's variants, on the ranks of a group: with the defaults of the command, and the
    config that the mistake concerns."""
    with knows_who_trains(), PLANTED[name].plant():
        return judge(place, PLANTED[name], steps=steps, accumulation=accumulation)


def judge(
    place: RankContext, mistake: Planted, *, steps: int = STEPS, accumulation: Sequence[int] = ()
) -> list[Outcome]:
    """The same without the mistake."""
    workload = mistake.workload()
    config = load_config(flags={**FLAGS, **mistake.flags}, environ={})
    sources = {name: as_source(value, split=name) for name, value in workload.datasets().items()}
    question = VerifyOptions([mistake.strategy], [place.world_size], accumulation or _accumulation(), steps)
    plan = make_plan(config, question, workload, sources)
    assignment = Assignment(plan.reference, tuple(plan.groups[place.world_size]), question.allowed)
    return verify_group(place, assignment, {}, sources=sources)[0]


def judge_sound(place: RankContext, name: str) -> list[Outcome]:
    """What verify says where the mistake is not made."""
    return judge(place, PLANTED[name])


def _accumulation() -> list[int]:
    """The command's default, of which there is one copy."""
    return VerifyOptions().pieces


def said(outcomes: list[Outcome]) -> str:
    """The classes that verify named, the first first; "" where it found nothing."""
    return "; ".join(dict.fromkeys(str(o.mismatch.cause) for o in outcomes if o.mismatch is not None))


def as_markdown() -> str:
    """The table of planted_mistakes.md."""
    rows = ["| Mistake | Where | Only on several workers | Class | `verify` says |", "|---|---|---|---|---|"]
    for mistake in PLANTED.values():
        run = f"{mistake.strategy} x {mistake.world_size}"
        said = "as it should" if not mistake.misnamed else "nothing" if mistake.misnamed == "-" else mistake.misnamed
        alone = "no" if mistake.strikes_alone else "yes"
        rows.append(f"| {mistake.what} ({run}) | `{mistake.where}` | {alone} | {mistake.expected} | {said} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Print the table of what verify says about every mistake."""
    from gloo_pool import GlooPool

    chosen = [m for m in PLANTED.values() if not sys.argv[1:] or any(word in m.name for word in sys.argv[1:])]
    pool, rows = GlooPool(), []
    for mistake in chosen:
        try:
            found = said(pool.run(mistake.world_size, judge_planted, mistake.name)[0])
        except Exception as exc:
            found = f"({type(exc).__name__}: {str(exc).splitlines()[-1][:90]})"
        rows.append((mistake, found))
        print(f"{mistake.name:<62} {mistake.expected:<38} {found or '-'}", flush=True)
    pool.stop()
    for title, part in (("all", rows), ("wrong only on several", [r for r in rows if not r[0].strikes_alone])):
        seen = [r for r in part if r[1] and not r[1].startswith("(")]
        named = [r for r in seen if r[1].split("; ")[0] == r[0].expected]
        print(f"{title}: {len(seen)} of {len(part)} found, {len(named)} named rightly")


if __name__ == "__main__":
    import planted_mistakes as module  # whose functions the processes can find

    module.main()
