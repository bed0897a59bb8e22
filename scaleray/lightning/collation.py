"""Rows to the batches that a module's own loaders would give it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from scaleray.data.collation import Columnwise, refuse_ragged
from scaleray.data.source import Columns, rows_in
from scaleray.lightning.batches import batch_of, items_of, split_of


class Collation(Columnwise):
    """Batches with the split and the number of rows that they are of.

    own: gives the collation that the loader of a split has of its own; rows of any other are put together as torch
    does.
    """

    def __init__(self, own: Callable[[str], Any]) -> None:
        self.own = own

    def __call__(self, rows: Columns) -> dict[str, Any]:
        split, has_own = split_of(rows)
        num_rows = rows_in(rows)
        if has_own:
            batch = self.own(split)(list(items_of(rows)))
        else:
            refuse_ragged(rows, what=f"the {split} data")
            batch = batch_of({name: torch.from_numpy(column) for name, column in rows.items()})
        return {"split": split, "rows": num_rows, "batch": batch}
