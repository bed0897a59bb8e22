"""Where the losses of two trainings part."""

from __future__ import annotations

from scaleray.tracking.find_record import FoundRun
from scaleray.tracking.steps_file import step_rows


def loss_difference(label: str, run: FoundRun, base: FoundRun) -> str:
    """A sentence: equal to the bit, or the first step whose loss differs and the largest relative difference."""
    mine, theirs = _losses(run), _losses(base)
    common = sorted(mine.keys() & theirs.keys())
    who = f"losses of {label} and A"
    if not common:
        return f"{who}: there are no common steps to compare"
    # a loss that is not finite equals itself here
    apart = [step for step in common if repr(mine[step]) != repr(theirs[step])]
    if not apart:
        return f"{who}: equal to the bit in all {len(common)} common steps"
    distances = {step: abs(mine[step] - theirs[step]) / max(abs(theirs[step]), 1e-300) for step in apart}
    worst = max(distances, key=lambda step: distances[step] if distances[step] == distances[step] else float("inf"))
    return (
        f"{who}: differ first at step {apart[0]}, by {distances[apart[0]]:.1e} of A's; "
        f"most at step {worst}, by {distances[worst]:.1e}"
    )


def _losses(run: FoundRun) -> dict[int, float]:
    return {int(row["step"]): row["loss"] for row in step_rows(run.steps)}
