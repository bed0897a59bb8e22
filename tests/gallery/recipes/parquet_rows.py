"""A Parquet file in row groups."""

import pyarrow as pa
import pyarrow.parquet as pq
from recipe import Recipe, X, Y

from scaleray.data import ParquetSource


class Workload(Recipe):
    @staticmethod
    def prepare():
        x = pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 4)
        pq.write_table(pa.table({"x": x, "y": Y}), "rows.parquet", row_group_size=5)

    def datasets(self):
        return {"train": ParquetSource("rows.parquet")}
