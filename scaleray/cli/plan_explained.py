"""What the planner's figures are, why layouts were dropped, and what a step does when: lines for a terminal."""

from __future__ import annotations

from scaleray.cli.plan_options import ClusterOptions, ModelOptions, RecipeOptions


def explained(
    what: str, *, model: ModelOptions, cluster: ClusterOptions, recipe: RecipeOptions, rows: int
) -> list[str]:
    """The lines of `scaleray plan explain`. Raises UsageError for a question that cannot be answered."""
    from scaleray.planner.answers.explain import (
        explain_constants,
        explain_hardware,
        explain_intervals,
        explain_layouts,
        explain_step,
    )

    if what == "constants":
        return explain_constants()
    if what == "intervals":
        return explain_intervals()
    if what in ("layouts", "step"):
        from scaleray.cli.plan_question import question_of

        question = question_of(model, cluster, recipe)
        return (explain_layouts if what == "layouts" else explain_step)(question, rows=rows)
    return explain_hardware(what)
