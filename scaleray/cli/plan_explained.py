"""The planner's figures, and the reasons for which it drops layouts, as lines for a terminal."""

from __future__ import annotations

from scaleray.cli.plan_options import ClusterOptions, ModelOptions, RecipeOptions


def explained(
    what: str, *, model: ModelOptions, cluster: ClusterOptions, recipe: RecipeOptions, rows: int
) -> list[str]:
    """The lines of `scaleray plan explain`. Raises UsageError for a question that cannot be answered."""
    from scaleray.planner.answers.explain import explain_constants, explain_hardware, explain_intervals, explain_layouts

    if what == "constants":
        return explain_constants()
    if what == "intervals":
        return explain_intervals()
    if what == "layouts":
        from scaleray.cli.plan_question import question_of

        return explain_layouts(question_of(model, cluster, recipe), rows=rows)
    return explain_hardware(what)
