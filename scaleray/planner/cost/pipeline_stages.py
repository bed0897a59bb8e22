"""Divide a model into pipeline stages: with the same number of layers in each, or so that the slowest stage is as fast
as possible."""

from scaleray.planner.models.block_counts import ModelProfile

PRECISION = 1e-6
"""Relative precision of the search for the lowest cost of the slowest stage."""


def even_cuts(model: ModelProfile, num_stages: int) -> list[int]:
    """Positions at which to cut the list of blocks so that each stage has the same number of repeated blocks."""
    singles = [block.count > 1 for block in model.blocks for _ in range(block.count)]
    if not any(singles):
        singles = [True] * len(singles)
    layers = [index for index, is_layer in enumerate(singles) if is_layer]
    per_stage = len(layers) / num_stages
    return [0] + [layers[round(per_stage * stage)] for stage in range(1, num_stages)] + [len(singles)]


def balanced_cuts(costs: list[float], num_stages: int) -> list[int]:
    """Cut `costs` into consecutive stages that minimise the cost of the most expensive one."""
    low, high = max(costs), sum(costs)
    backwards = costs[::-1]
    # cuts change only if a block moves, so a fine bracket is as good as an exact bound
    while high > low * (1 + PRECISION):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(backwards, middle, num_stages) else (middle, high)
    starts = _cut(costs, high)
    return starts + [len(costs)] * (num_stages + 1 - len(starts))


def filled_cuts(costs: list[float], num_stages: int) -> list[int]:
    """Positions at which to cut `costs` into stages that each take blocks until the running sum exceeds their share."""
    starts, total, so_far = [0], sum(costs), 0.0
    for index, cost in enumerate(costs):
        so_far += cost
        if so_far > total * len(starts) / num_stages * (1 + 1e-9) and len(starts) < num_stages:
            starts.append(index + 1)
    return starts + [len(costs)] * (num_stages + 1 - len(starts))


def _fits(backwards: list[float], limit: float, num_stages: int) -> bool:
    """Whether `_cut` would make at most this many stages; called dozens of times per cut."""
    filled, limit = 0.0, limit * (1 + 1e-9)
    for cost in backwards:
        together = filled + cost
        if together > limit and filled > 0:
            num_stages -= 1
            if not num_stages:
                return False
            together = cost
        filled = together
    return True


def _cut(costs: list[float], limit: float) -> list[int]:
    """Starts of stages that cost at most `limit`, filled from the last backwards. The first stage, which has the most
    micro-batches in flight, gets the rest."""
    starts, filled = [0], 0.0
    for index in range(len(costs) - 1, -1, -1):
        if filled + costs[index] > limit * (1 + 1e-9) and filled > 0:
            starts.append(index + 1)
            filled = 0.0
        filled += costs[index]
    return sorted(starts)
