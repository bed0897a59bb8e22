"""Gossip graphs (the pairs of workers that average in a step) as mixing matrices, equal on all ranks by
construction."""

import numpy as np


def mixing_matrix(graph: str, size: int, step: int, *, seed: int = 0) -> np.ndarray:
    """Mixing weights (size, size) for step `step`, counted from 1. Row i has the weights of all ranks in rank i's new
    mean.

    Rows and columns sum to 1, so mixing leaves the mean unchanged. `ring`: one third each from the rank itself and its
    two neighbours, as in Lian et al. 2017, arXiv:1705.09056. `exponential`: half from itself, half from the rank at
    distance 1, 2, 4, ... in successive steps; with 2^k ranks, k steps of mixing alone give the exact mean (Assran et
    al. 2018, arXiv:1811.10792). `matching`: half from itself, half from a random partner, drawn again in each step; if
    the number of ranks is odd, one has no partner (Boyd et al. 2006, doi:10.1109/TIT.2006.874516)."""
    if graph == "ring":
        return _ring(size)
    if graph == "exponential":
        return _exponential(size, step)
    if graph == "matching":
        return _matching(size, np.random.default_rng([seed, step]))
    raise ValueError(f"no graph is called {graph}")


def _ring(size: int) -> np.ndarray:
    if size < 3:  # both neighbours are the same one
        return np.full((size, size), 1.0 / size)
    matrix = np.zeros((size, size))
    for rank in range(size):
        for other in (rank - 1, rank, rank + 1):
            matrix[rank, other % size] = 1.0 / 3.0
    return matrix


def _exponential(size: int, step: int) -> np.ndarray:
    num_distances = max(1, (size - 1).bit_length())
    distance = 2 ** ((step - 1) % num_distances)
    matrix = 0.5 * np.eye(size)
    for rank in range(size):
        matrix[rank, (rank - distance) % size] += 0.5
    return matrix


def _matching(size: int, draw: np.random.Generator) -> np.ndarray:
    matrix, order = np.eye(size), draw.permutation(size)
    for first, second in zip(order[0::2], order[1::2], strict=False):
        matrix[np.ix_([first, second], [first, second])] = 0.5
    return matrix
