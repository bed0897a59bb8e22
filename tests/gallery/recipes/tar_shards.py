"""WebDataset shards."""

import io
import tarfile

import numpy as np
from recipe import Recipe, X, Y

from scaleray.data.tar_shards import TarSource


class Workload(Recipe):
    @staticmethod
    def prepare():
        with tarfile.open("rows.tar", "w") as shard:
            for number, (x, y) in enumerate(zip(X, Y, strict=True)):
                array = io.BytesIO()
                np.save(array, x)
                for ending, content in (("x.npy", array.getvalue()), ("y.cls", str(y).encode())):
                    member = tarfile.TarInfo(f"{number:03d}.{ending}")
                    member.size = len(content)
                    shard.addfile(member, io.BytesIO(content))

    def datasets(self):
        return {"train": TarSource("rows.tar")}

    def loss(self, model, batch):
        x, y = (batch[name] for name in sorted(batch))
        return super().loss(model, (x, y))
