"""Pollux's throughput model with its seven parameters, to compare with: it knows nothing of the machine and is fitted
to each trace.

    T_grad = alpha_c + beta_c * b
    T_net = alpha + beta * max(n - 2, 0), one pair in a node, one between nodes, 0 on one GPU
    T_iter = (T_grad^g + T_net^g)^(1/g), g from 1 (no overlap) to 10 (almost all)

Source: Qiao et al. 2021, OSDI, section 4.1; adaptdl/goodput.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

NUM_PARAMETERS = 7
Point = tuple[int, int, float, float]
"""(nodes, replicas, local batch, step time in seconds)."""


@dataclass(frozen=True)
class PolluxModel:
    """The fitted parameters: alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma."""

    parameters: tuple[float, ...]

    def step_time_s(self, num_nodes: int, num_replicas: int, local_batch: float) -> float:
        """Seconds of a step."""
        points = np.array([[num_nodes, num_replicas, local_batch]], dtype=float)
        return float(_times(np.array(self.parameters), points)[0])


def fit_pollux(points: Sequence[Point]) -> PolluxModel:
    """Least squares of the logarithm of the step time, from several starts. Deterministic."""
    data = np.array([point[:3] for point in points], dtype=float)
    target = np.log([point[3] for point in points])
    smallest = float(np.exp(target).min())

    def loss(log_values: np.ndarray) -> float:
        return float(np.mean((np.log(_times(_unpack(log_values), data)) - target) ** 2))

    best: tuple[float, np.ndarray] | None = None
    for share in (0.02, 0.2, 1.0):
        start = np.log(
            [
                smallest,
                smallest / 50,
                smallest * share,
                smallest * share / 10,
                smallest * share / 5,
                smallest * share / 50,
            ]
        )
        found = minimize(loss, np.append(start, 0.0), method="L-BFGS-B", bounds=[(-20, 5)] * 6 + [(-6, 6)])
        if best is None or found.fun < best[0]:
            best = float(found.fun), found.x
    assert best is not None
    return PolluxModel(tuple(float(value) for value in _unpack(best[1])))


def _unpack(log_values: np.ndarray) -> np.ndarray:
    values = np.exp(log_values)
    gamma = 1 + 9 / (1 + np.exp(-log_values[6]))
    return np.append(values[:6], gamma)


def _times(parameters: np.ndarray, points: np.ndarray) -> np.ndarray:
    alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma = parameters
    nodes, replicas, batch = points.T
    grad = alpha_c + beta_c * batch
    further = np.maximum(replicas - 2, 0)
    # several nodes are never faster than one node, as in Pollux
    net = np.where(nodes > 1, max(alpha_n, alpha_r) + max(beta_n, beta_r) * further, alpha_r + beta_r * further)
    net = np.where(replicas > 1, net, 1e-9)
    return (grad**gamma + net**gamma) ** (1 / gamma)
