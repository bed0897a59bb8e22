"""Numbers of the other byte order and of half precision."""

import numpy as np
from recipe import Recipe, X, Y


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X.astype(">f4"), "y": Y.astype(np.uint8), "half": X.astype(np.float16)}}
