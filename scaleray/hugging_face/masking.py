"""Masks of masked language models: which tokens are hidden follows from the row's seed, so it is the same on any number
of workers.

Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1: of the chosen tokens 80 % become the mask, 10 % another token
and 10 % stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scaleray.hugging_face.token_rows import IGNORED

MASKED_SHARE, RANDOM_SHARE = 0.8, 0.1


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden. share: of the tokens that are no special ones; mask: id of the mask; special: ids that are
    never hidden; vocabulary: number of ids."""

    share: float
    mask: int
    special: tuple[int, ...]
    vocabulary: int

    def hide(self, ids: np.ndarray, rng: Any) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (rows, length) with some hidden, and labels: the hidden tokens, and -100 elsewhere.

        rng: a `scaleray.data.RowRandom` of these rows.
        """
        length = ids.shape[1]
        chance, kind = rng.random(length), rng.random(length)
        drawn = rng.integers(self.vocabulary, shape=length)
        is_chosen = (chance < self.share) & ~np.isin(ids, self.special)
        labels = np.where(is_chosen, ids, IGNORED).astype(ids.dtype)
        hidden = np.where(is_chosen & (kind < MASKED_SHARE), self.mask, ids)
        is_random = is_chosen & (kind >= MASKED_SHARE) & (kind < MASKED_SHARE + RANDOM_SHARE)
        return np.where(is_random, drawn, hidden).astype(ids.dtype), labels
