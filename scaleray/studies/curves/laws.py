"""Laws of throughput by number of workers, and their fit to measured points.

With r = workers over those of the base, lambda = throughput of the base, S = throughput over lambda:"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Array = NDArray[np.float64]
MOST_STEPS = 50
LEAST_POINTS_FOR_KAPPA = 4
"""Smallest number of points with which the USL's kappa is fitted. With fewer it is 0, and the USL equals Amdahl's
law."""


@dataclass(frozen=True)
class GivenLaw:
    """A law from another source, such as the planner's model. Its shape is fixed; only its scale is fitted."""

    name: str
    throughput: Callable[[float], float]
    """Function from the number of workers, also fractional, to the throughput in any unit, above 0."""


@dataclass(frozen=True)
class Law:
    """A family of curves: `basis` @ coefficients is S times lambda, or r over it where `is_inverse`."""

    name: str
    basis: Callable[[Array], Array]
    """Function from r, (num_points,), to the basis, (num_points, num_coefficients)."""
    is_inverse: bool
    parameters: Callable[[Array], dict[str, float]]
    """Function from the coefficients, (num_coefficients,), to the law's parameters by name."""
    least_points: int = 2
    """Smallest number of points that determine the law."""

    def log_throughput(self, coefficients: Array, r: Array) -> Array:
        """Logarithm of the throughput at r, (num_points,), or (num_points, num_fits) for coefficients with a second
        axis."""
        value = np.log(np.maximum(self.basis(r) @ coefficients, np.finfo(float).tiny))
        return np.log(r).reshape(-1, *[1] * (value.ndim - 1)) - value if self.is_inverse else value

    def fit(self, r: Array, log_throughput: Array, weights: Array, *, start: Array | None = None) -> Array:
        """The coefficients that minimise sum(weights * (log_throughput - law)^2). r to weights: (num_points,).

        start: coefficients near the solution, to save time."""
        basis, root = self.basis(r), np.sqrt(weights)
        target = np.exp(np.log(r) - log_throughput if self.is_inverse else log_throughput)
        coefficients = nnls(basis / target[:, None] * root[:, None], root)[0] if start is None else start
        for _ in range(MOST_STEPS):
            now = basis @ coefficients
            if now.min() <= 0:
                break
            before = coefficients
            coefficients = nnls(basis / now[:, None] * root[:, None], (np.log(target / now) + 1.0) * root)[0]
            if np.abs(coefficients - before).max() <= 1e-8 * coefficients.max():
                break
        return coefficients


def amdahl(r: float, f: float) -> float:
    """Speed-up of r workers over one with the serial share f."""
    return 1.0 / (f + (1.0 - f) / r)


def gustafson(r: float, f: float) -> float:
    """Scaled speed-up of r workers over one with the serial share f of the parallel run."""
    return r - f * (r - 1.0)


def usl(r: float, sigma: float, kappa: float) -> float:
    """Speed-up of r workers over one under the Universal Scalability Law."""
    return r / (1.0 + sigma * (r - 1.0) + kappa * r * (r - 1.0))


def laws_for(num_points: int, given: Sequence[GivenLaw] = (), *, base_workers: int = 1) -> list[Law]:
    """The laws that can be fitted to this number of points, simplest first."""
    last = _USL if num_points >= LEAST_POINTS_FOR_KAPPA else _USL_WITHOUT_KAPPA
    every = [*(_as_law(law, base_workers) for law in given), _AMDAHL, _GUSTAFSON, last]
    return [law for law in every if num_points >= law.least_points]


def _ones_and(*columns: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda r: np.column_stack([np.ones_like(r), *(column(r) for column in columns)])


def _share(coefficients: Array, number: int) -> float:
    """Coefficient `number` divided by the value at the base, where r is 1."""
    total = float(coefficients[0] + coefficients[1])
    return float(coefficients[number]) / total if total > 0 else 0.0


_AMDAHL = Law("amdahl", _ones_and(lambda r: r), True, lambda c: {"f": _share(c, 1)})
_GUSTAFSON = Law("gustafson", _ones_and(lambda r: r), False, lambda c: {"f": _share(c, 0)})
_USL = Law(
    "usl",
    _ones_and(lambda r: r, lambda r: r * (r - 1.0)),
    True,
    lambda c: {"sigma": _share(c, 1), "kappa": _share(c, 2)},
)
_USL_WITHOUT_KAPPA = Law("usl", _AMDAHL.basis, True, lambda c: {"sigma": _share(c, 1), "kappa": 0.0})


def _as_law(given: GivenLaw, base_workers: int) -> Law:
    ask = functools.cache(given.throughput)  # a model may be slow, and every draw of the points asks for the same

    def basis(r: Array) -> Array:
        workers = [float(x) * base_workers for x in r]
        values = [ask(n) for n in workers]
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise ValueError(
                f"the law {given.name} gives throughputs of {values} on {workers} workers, which must be above 0"
            )
        return np.array(values)[:, None]

    return Law(given.name, basis, False, lambda c: {"scale": float(c[0])}, least_points=1)
