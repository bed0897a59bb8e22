"""Images of unequal size: read as they are, and made equal by a transform, or put together by a collate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_runs import relative_differences, train, train_alone
from torch import nn

from scaleray.data import Padding, Ragged, as_source, load_sources
from scaleray.data.ragged import concatenated, with_shapes
from scaleray.errors import DataError

SIZES = [(3, 4), (2, 2), (5, 3), (2, 6), (4, 4)]
IMAGES = [np.random.default_rng(n).normal(size=(*SIZES[n % 5], 3)).astype(np.float32) for n in range(20)]


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, index):
        return {"image": IMAGES[index], "y": index % 3}


def resized(image):
    """The image as 2 x 2 pixels, each the mean of a quarter."""
    halves = [np.array_split(half, 2, axis=1) for half in np.array_split(image, 2)]
    return np.array([[piece.mean(axis=(0, 1)) for piece in half] for half in halves], dtype=np.float32)


class Resizing:
    given = Images

    def build_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))

    def datasets(self):
        return {"train": self.given()}

    def transform(self, rows, rng):
        shift = 0.1 * rng.normal((2, 2, 3)).astype(np.float32)
        return {**rows, "image": np.stack([resized(image) for image in rows["image"]]) + shift}

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["image"]), batch["y"], reduction="sum"), len(batch["y"])


class InMemory(Resizing):
    def datasets(self):
        return {"train": {"image": IMAGES, "y": np.arange(20) % 3}}


def test_a_transform_makes_images_of_one_size_and_workers_train_what_one_does(gloo):
    sources = [load_sources(kind())["train"] for kind in (Resizing, InMemory)]
    assert [source.read(np.array([4, 0]))["image"].shape for source in sources] == [(2, 2, 2, 3)] * 2
    alone = train_alone(Resizing(), {"batch.global_size": 4})
    assert train_alone(InMemory(), {"batch.global_size": 4}).losses == alone.losses and len(alone.losses) == 10
    spread = gloo.run(2, train, Resizing(), {"batch.global_size": 4})[0]
    assert max(relative_differences(spread.losses, alone.losses)) < 1e-9


def test_a_collate_of_the_users_own_gets_each_image_in_its_size():
    class Collating(Resizing):
        transform = None

        def collate(self, rows):
            images = torch.stack([torch.from_numpy(resized(row["image"].numpy())) for row in rows])
            return {"image": images, "y": torch.stack([row["y"] for row in rows])}

    found = train_alone(Collating(), {"batch.global_size": 4})
    without_shift = type("Plain", (Resizing,), {"transform": lambda self, rows, rng: {
        **rows, "image": np.stack([resized(image) for image in rows["image"]])
    }})()  # fmt: skip
    assert found.losses == train_alone(without_shift, {"batch.global_size": 4}).losses


def test_images_that_nothing_makes_equal_are_refused_with_the_way_out():
    plain = type("Plain", (Resizing,), {"transform": None})
    with pytest.raises(
        DataError, match=r"has rows of unequal size .2 x 2 x 3 to 5 x 3 x 3 values.[^$]*np.stack\(\[resize"
    ):
        load_sources(plain())
    padded = type("Padded", (plain,), {"collate": Padding()})
    with pytest.raises(DataError, match="only along their first dimension"):
        train_alone(padded(), {"batch.global_size": 4})
    mixed = [np.ones((2, 2)), np.ones((2, 2, 3))]
    with pytest.raises(DataError, match="not in their number of dimensions"):
        as_source({"image": mixed}, split="train")


def test_a_column_of_images_is_cut_indexed_and_joined_like_a_list():
    column = Ragged.of(IMAGES)
    same = lambda found, expected: len(found) == len(expected) and all(map(np.array_equal, found, expected))
    assert same(column, IMAGES) and same(column[3:9], IMAGES[3:9]) and np.array_equal(column[-1], IMAGES[-1])
    assert same(column[np.array([7, 2, 2])], [IMAGES[7], IMAGES[2], IMAGES[2]])
    equal = np.stack([IMAGES[0], IMAGES[5]])
    assert same(concatenated([column[:2], equal, column[4:6]]), [*IMAGES[:2], IMAGES[0], IMAGES[5], *IMAGES[4:6]])
    assert same(with_shapes(equal), list(equal)) and same(column.copy(), IMAGES)
    assert column.lengths.tolist() == [len(image) for image in IMAGES]
    assert repr(column) == "Ragged(20 rows of float32 of 2 x 2 x 3 to 5 x 3 x 3 values)"
