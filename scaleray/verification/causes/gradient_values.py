"""Diagnosis by a gradient's values, if it is not a mixture of its micro-batches' gradients: relate each parameter's
values to the right ones."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from scaleray.verification.bounds import ROUNDED, SAME_RATIO
from scaleray.verification.causes.cause_classes import Cause, Finding, Layout, is_near, ratio_finding


@dataclass(frozen=True)
class Relation:
    """Relation of one parameter's wrong gradient to the right one. part: share of wrong values; ratio: their common
    factor, or None; is_moved: whether the values are only permuted; of_parameter: multiple of the parameter that was
    added, or None; apart: relative difference of the whole gradient."""

    part: float
    ratio: float | None = None
    is_moved: bool = False
    of_parameter: float | None = None
    apart: float = 0.0


def relation_of(found: torch.Tensor, due: torch.Tensor, parameter: torch.Tensor) -> Relation | None:
    """Relate a gradient to the right one; None if they are equal. All arguments have the same shape."""
    found, due, parameter = (t.detach().double().flatten() for t in (found, due, parameter))
    least = SAME_RATIO * float(due.abs().max()) if due.numel() else 0.0
    wrong = (found - due).abs() > least
    if not bool(wrong.any()):
        return None
    apart = float((found - due).norm() / due.norm()) if float(due.norm()) else 1.0
    is_moved = bool(((found.sort().values - due.sort().values).abs() <= least).all())
    return Relation(
        float(wrong.double().mean()),
        _factor(found[wrong], due[wrong], least),
        is_moved,
        _factor((found - due)[wrong], parameter[wrong], least),
        apart,
    )


def _factor(values: torch.Tensor, of: torch.Tensor, least: float) -> float | None:
    """The common factor between `values` and `of`; None if there is none."""
    square = float(of @ of)
    factor = float(values @ of) / square if square else 0.0
    return factor if bool(((values - factor * of).abs() <= 2 * least).all()) and square else None


def from_values(relations: Mapping[str, Relation], num_parameters: int, layout: Layout) -> Finding | None:
    """Class of the cause, given the relations of wrong gradients to right ones; None if they have nothing in common."""
    if not relations:
        return None
    name, first = next(iter(relations.items()))
    found = list(relations.values())
    where = f"in {len(found)} of {num_parameters} parameters ({name}: {100 * first.part:.3g} % of the values)"
    decays = [r.of_parameter for r in found]
    if None not in decays and all(is_near(float(d or 0.0), float(decays[0] or 1.0)) for d in decays):
        return Finding(Cause.UPDATE, f"{decays[0]:.4g} times the parameter was added to its gradient {where}", name)
    if all(r.is_moved for r in found):
        return Finding(Cause.MISSING_SYNCHRONISATION, f"values of the gradient have changed places {where}", name)
    ratios = [r.ratio for r in found if r.ratio is not None]
    if len(ratios) == len(found):
        return _by_ratio(ratios, where, name, layout)
    if ratios and all(abs(r) < SAME_RATIO for r in ratios):
        return Finding(Cause.MISSING_SYNCHRONISATION, f"values of the gradient are missing {where}", name)
    if max(r.apart for r in found) < ROUNDED:
        return Finding(Cause.DTYPE, f"the gradient differs by rounding, {first.apart:.2g} of its norm, {where}", name)
    return None


def _by_ratio(ratios: list[float], where: str, name: str, layout: Layout) -> Finding:
    if all(abs(ratio) < SAME_RATIO for ratio in ratios):
        return Finding(Cause.MISSING_SYNCHRONISATION, f"values of the gradient are missing {where}", name)
    odd = next((ratio for ratio in ratios if not is_near(ratio, ratios[0])), None)
    why = f"values of the gradient are {ratios[0]:.6g} times as large {where}"
    if odd is None and ratios[0] > 0:
        return Finding(ratio_finding(ratios[0], layout).cause, why, name)
    # each rank has a part of the sum
    cause = Cause.DOUBLE_SYNCHRONISATION if min(ratios) > 1 else Cause.MISSING_SYNCHRONISATION
    return Finding(cause, why, name)
