"""A plan as plain values, for `scaleray plan --json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from scaleray.planner.answers.advise import Advice, Choice
from scaleray.planner.answers.outlook import Outlook
from scaleray.planner.answers.to_target import Way
from scaleray.planner.cost.checkpoint_stalls import CheckpointCost


def plan_record(
    advice: Advice, seen: Outlook, *, rows: int, kept: CheckpointCost | None = None, ways: Sequence[Way] = ()
) -> dict[str, Any]:
    """The first `rows` choices, up to 200 rejected layouts, the curve, and checkpoints and ways to a target where they
    were asked for."""
    return (
        _question(advice)
        | _choices(advice, rows)
        | _curve(seen)
        | {
            "checkpoints": None if kept is None else dataclasses.asdict(kept),
            "to_target": [_way(way) for way in ways],
            "limit": seen.limit,
            "next_doubling": {"words": seen.doubling, "gain": seen.doubling_gain},
        }
    )


def _question(advice: Advice) -> dict[str, Any]:
    return {
        "model": advice.question.model.name,
        "num_params": advice.question.model.num_params,
        "num_gpus": advice.question.cluster.num_gpus,
        "gpu": advice.question.cluster.gpu.name,
        "global_batch": advice.question.global_batch,
        "learned": list(advice.question.learned),
        "assumed": [*advice.question.cluster.notes, *advice.question.model.notes],
    }


def _choices(advice: Advice, rows: int) -> dict[str, Any]:
    return {
        "num_layouts": advice.num_layouts,
        "choices": [_choice(one) for one in advice.choices[:rows]],
        "recommended": advice.best.layout.describe(),
        "surely_fits": advice.best.fits == "fits",
        "faster_but_may_not_fit": None
        if advice.faster is None
        else _choice(advice.faster) | {"gain": advice.faster.samples_per_s / advice.best.samples_per_s - 1},
        "rejected": [
            {"words": one.layout.describe(), "reason": one.reason, "missing_gib": one.missing_gib}
            for one in advice.rejected[:200]
        ],
    }


def _choice(one: Choice) -> dict[str, Any]:
    return {
        "layout": dataclasses.asdict(one.layout),
        "words": one.layout.describe(),
        "step_time_s": dataclasses.asdict(one.step_time_s),
        "parts_s": one.step.parts(),
        "hidden_comm_s": one.step.hidden_comm_s,
        "memory_bytes": one.memory.parts(),
        "device_bytes": one.memory.device_bytes,
        "fits": one.fits,
        "samples_per_s": one.samples_per_s,
        "tokens_per_s": one.tokens_per_s,
        "mfu": one.mfu,
        "interval_class": one.kind,
        "interval_reasons": [dataclasses.asdict(reason) for reason in one.reasons],
        "is_trusted": one.is_trusted,
        "doubts": one.doubts,
        "cost_per_million_samples": one.cost_per_million_samples,
    }


def _curve(seen: Outlook) -> dict[str, Any]:
    return {
        "curve": [
            {
                "num_gpus": point.num_gpus,
                "samples_per_s": dataclasses.asdict(point.samples_per_s),
                "efficiency": point.efficiency,
                "words": point.choice.layout.describe(),
                "fits": point.choice.fits,
            }
            for point in seen.points
        ],
        "curve_base": {
            "words": "one GPU alone, were its memory large enough",
            "samples_per_s": seen.alone.samples_per_s,
        },
        "curve_remarks": seen.remarks,
    }


def _way(way: Way) -> dict[str, Any]:
    return {
        "num_gpus": way.num_gpus,
        "batch_size": way.batch_size,
        "words": way.choice.layout.describe(),
        "samples": dataclasses.asdict(way.samples),
        "steps": way.steps,
        "hours": dataclasses.asdict(way.hours),
        "gpu_hours": way.gpu_hours,
        "cost": way.cost,
        "time_ratio": way.time_ratio,
        "fits": way.choice.fits,
        "is_trusted": way.is_trusted,
        "is_on_frontier": way.is_on_frontier,
    }
