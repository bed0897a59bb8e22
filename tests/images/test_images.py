"""Folders of images: rows, seeded pieces, broken files, and models by name."""

from __future__ import annotations

import os
import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from small_images import Small, write_images
from small_runs import make_job, train_alone
from torch import nn
from verified import judge_all

from scaleray.data import TRAIN
from scaleray.data.row_random import RowRandom
from scaleray.errors import CheckpointError, ConfigError, DataError, WorkloadError
from scaleray.images import ImageClassification, ImageData
from scaleray.images.classifier import load_weights
from scaleray.images.image_data import Shape, central_box, decode, random_box
from scaleray.images.image_folder import ImageFolder, class_names


@pytest.fixture
def folder(tmp_path):
    write_images(tmp_path / "train", 6)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    return tmp_path / "train"


def small(folder, **more):
    return Small(data={TRAIN: str(folder), "val": str(folder)}, size=8, **more)


def test_rows_are_files_sorted_by_class_with_labels(folder):
    source = small(folder).datasets()[TRAIN]
    assert (source.num_rows, source.arrays["labels"].tolist()) == (6, [0, 0, 0, 1, 1, 1])
    assert source.describe()["kind"] == "images"
    before = source.describe()["sha256"]
    (folder / "dog" / "7.png").write_bytes((folder / "dog" / "1.png").read_bytes())
    assert small(folder).datasets()[TRAIN].describe()["sha256"] != before


def test_classes_that_are_numbers_are_in_their_order(tmp_path):
    for name in ("10", "9", "1"):
        (tmp_path / name).mkdir()
    assert class_names(str(tmp_path)) == ["1", "9", "10"]


def test_an_evaluation_takes_the_middle_and_training_a_piece_that_follows_from_the_rows_seed(folder):
    data = small(folder).images
    rows = small(folder).datasets()[TRAIN].read(np.arange(6))
    seeds = np.arange(6, dtype=np.uint64)
    first = data.transform(dict(rows), RowRandom(seeds), TRAIN)["pixel_values"]
    alone = data.transform({n: v[4:5] for n, v in rows.items()}, RowRandom(seeds[4:5]), TRAIN)["pixel_values"]
    np.testing.assert_array_equal(first[4:5], alone)
    assert not np.array_equal(first, data.transform(dict(rows), RowRandom(seeds + 9), TRAIN)["pixel_values"])
    val = data.transform(dict(rows), RowRandom(seeds), "val")["pixel_values"]
    np.testing.assert_array_equal(val, data.transform(dict(rows), RowRandom(seeds + 9), "val")["pixel_values"])
    is_mirrored = first[0, 0, 0, 0] > first[0, 0, 0, -1]
    others = (data.transform(dict(rows), RowRandom(seeds + np.uint64(n)), TRAIN)["pixel_values"] for n in range(1, 12))
    assert any((o[0, 0, 0, 0] > o[0, 0, 0, -1]) != is_mirrored for o in others)


def test_pieces_stay_inside_the_image_and_cover_the_shares_asked_for():
    draw = np.random.default_rng(0)
    for _ in range(300):
        left, upper, right, lower = random_box(40, 30, areas=(0.2, 0.9), numbers=draw.random(4))
        assert 0 <= left < right <= 40 + 1e-9 and 0 <= upper < lower <= 30 + 1e-9
        assert (right - left) * (lower - upper) <= 0.9 * 1200 + 1e-6
    assert central_box(40, 30, share=0.5) == (12.5, 7.5, 27.5, 22.5)


def test_colours_and_grey_come_as_asked_and_pixels_are_normalised(folder):
    path = next(folder.rglob("*.png"))
    whole = lambda width, height: (0, 0, width, height)
    assert decode(path, Shape(5, 3), whole).shape == (3, 5, 5) and decode(path, Shape(5, 1), whole).shape == (1, 5, 5)
    data = ImageData({TRAIN: str(folder)}, mean=[0.5, 0.5, 0.0], std=[0.5, 0.25, 1.0])
    pixels = data.pixels(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8), torch.float64)
    assert pixels.flatten().tolist() == pytest.approx([1.0, 2.0, 1.0])


@pytest.mark.parametrize("content", [b"no image", None], ids=["other", "cut off"])
def test_a_broken_image_is_one_error_with_its_path(folder, content):
    path = folder / "dog" / "1.png"
    path.write_bytes(content if content is not None else path.read_bytes()[:45])
    workload = small(folder)
    rows = workload.datasets()[TRAIN].read(np.arange(6))
    with pytest.raises(DataError, match=r"dog/1\.png.*cannot be read"):
        workload.transform(rows, RowRandom(np.arange(6, dtype=np.uint64)), TRAIN)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"data": {"val": "x"}}, "including train"),
        ({"crop": [0.5, 1.5]}, r"such as \[0.25, 1\]"),
        ({"channels": 2}, "1 .grey. or 3"),
        ({"mean": [0.5]}, "3 values each"),
        ({"size": 0}, "at least 1"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(folder, args, words):
    with pytest.raises((ConfigError, DataError), match=words):
        Small(**{"data": {TRAIN: str(folder)}, **args})


def test_folders_that_hold_no_classes_or_other_ones_are_refused(folder, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        small(tmp_path / "nowhere").datasets()
    with pytest.raises(DataError, match="has no subfolders"):
        small(folder / "cat").datasets()
    with pytest.raises(DataError, match="dog: the classes are cat"):
        small(folder, classes=["cat"]).datasets()
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="supported extensions are"):
        small(tmp_path / "empty").datasets()


def test_an_image_folder_is_learned_and_decoded_by_ray_tasks_where_there_is_ray(folder):
    flags = {"batch.global_size": 3, "optimizer.learning_rate": 0.05, "stop.after": "40 epochs", "evaluation.every": "40 epochs"}  # fmt: skip
    job, _ = make_job(small(folder, flip=False), flags)
    assert job.splits[TRAIN].read_by("auto") == "ray"
    run = train_alone(small(folder, flip=False), flags)
    assert sum(run.losses[-6:]) < 0.5 * sum(run.losses[:6])


def verdicts(place, workload):
    return [outcome.verdict for outcome in judge_all(place, workload, {"batch.global_size": 4}, (1,), steps=3)]


def test_pieces_are_the_same_on_two_workers_as_on_one(gloo, folder):
    assert gloo.run(2, verdicts, small(folder))[0] == ["equal"]


# other images


def test_a_folder_that_is_no_split_is_read_with_whole_paths_and_with_labels_where_its_folders_are_classes(folder):
    workload = small(folder)
    for name in ("a", "b"):
        write_images(folder.parent / "new" / name, 2)
    loose, sorted_ones = (workload.read_data(str(folder.parent / name)) for name in ("new", "train"))
    assert loose.arrays.keys() == {"file"} and sorted_ones.arrays["labels"].tolist() == [0, 0, 0, 1, 1, 1]
    assert loose.beside["file"] == [str(folder.parent / "new" / f) for f in ("a/cat/0.png", "a/dog/1.png", "b/cat/0.png", "b/dog/1.png")]  # fmt: skip
    assert workload.read_data(str(folder.parent / "nowhere")) is None
    rows = workload.transform(loose.read(np.arange(4)), RowRandom(np.arange(4, dtype=np.uint64)), "predict")
    assert rows["pixel_values"].shape == (4, 3, 8, 8)


# models by name, of libraries that need not be there


class Named(nn.Module):
    def __init__(self, num_classes, width=4):
        super().__init__()
        self.body, self.fc = nn.Linear(3, width), nn.Linear(width, num_classes)


@pytest.fixture
def torchvision(monkeypatch):
    """A stand-in with the two functions that are called of torchvision.models."""
    models = types.ModuleType("torchvision.models")
    models.list_models = lambda: ["resnet18", "resnet34", "vit_b_16"]
    models.get_model = lambda name, weights, num_classes, **more: Named(num_classes, **more)
    library = types.ModuleType("torchvision")
    library.models = models
    monkeypatch.setitem(sys.modules, "torchvision", library)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)


def by_name(folder, **args):
    return ImageClassification(data={TRAIN: str(folder)}, **{"model": "torchvision:resnet18", **args}).build_model()


def test_a_model_by_name_has_as_many_classes_as_the_folder(folder, torchvision):
    model = by_name(folder, options={"width": 7})
    assert (model.fc.out_features, model.body.out_features) == (2, 7)
    for args, words in [
        ({"model": "resnet18"}, "torchvision:NAME or timm:NAME"),
        ({"model": "torchvision:resnet19"}, "similar: resnet18"),
        ({"options": {"depth": 2}}, "rejected them"),
    ]:
        with pytest.raises(WorkloadError, match=words):
            by_name(folder, **args)


def test_an_absent_library_is_named_with_its_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(WorkloadError, match=r"pip install '[^']+\[images\]'"):
        by_name(folder, model="timm:vit_tiny_patch16_224")


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_weights_come_from_a_file_and_a_head_of_other_classes_is_drawn(folder, torchvision, tmp_path, ending):
    other, path = Named(5), tmp_path / f"weights.{ending}"
    torch.save(other.state_dict(), path) if ending == "pt" else save_file(other.state_dict(), path)
    with pytest.warns(UserWarning, match="fc is initialised at random"):
        model = by_name(folder, weights=str(path))
    assert torch.equal(model.body.weight, other.body.weight) and model.fc.out_features == 2
    with pytest.raises(CheckpointError, match="layers other than the head differ"):
        load_weights(Named(2, width=3), str(path))
    with pytest.raises(CheckpointError, match="must be weights of this model"):
        load_weights(nn.Linear(2, 2), str(path))


def one_image(folder, values, mode=None, *, name="1.png", **options):
    """A folder with an image of these values, as the workload reads it: (channels, height, width)."""
    path = folder / "a" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(values)
    (image if mode is None else image.convert(mode)).save(path, **options)
    return decode(path, Shape(len(values), 3), lambda width, height: (0, 0, width, height))


RAMP = np.linspace(0, 255, 64).astype(np.uint8).reshape(8, 8)
WIDE = RAMP.astype(np.uint16) * 257


@pytest.mark.parametrize(
    ("values", "mode", "name"),
    [
        (WIDE, None, "1.png"),
        (WIDE, None, "1.tif"),
        (WIDE.astype(">u2"), None, "1.tif"),
        (WIDE, None, "1.pgm"),
        (RAMP, "L", "1.png"),
        (RAMP, "P", "1.png"),
        (RAMP, "LA", "1.png"),
        (RAMP, "RGBA", "1.webp"),
    ],
)
def test_images_of_every_mode_keep_their_values(values, mode, name, tmp_path):
    found = one_image(tmp_path, values, mode, name=name, **({"lossless": True} if name.endswith("webp") else {}))
    assert np.array_equal(found, np.broadcast_to(RAMP, (3, 8, 8)))


def test_16_bits_are_rounded_to_8(tmp_path):
    values = np.array([[0, 128, 129, 386], [8000, 40000, 65406, 65407]] * 2, np.uint16)
    found = one_image(tmp_path, values)
    assert found[0, :2].tolist() == [[0, 0, 1, 2], [31, 156, 254, 255]]


def test_what_is_transparent_lies_over_black(tmp_path):
    rgba = np.full((8, 8, 4), 200, np.uint8)
    rgba[:4, :, 3] = 0
    rgba[4:, :, 3] = 255
    expected = np.concatenate([np.zeros((3, 4, 8)), np.full((3, 4, 8), 200)], axis=1)
    assert np.array_equal(one_image(tmp_path, rgba), expected)
    palette = (RAMP >= 128).astype(np.uint8)  # two colours of a palette, of which one is transparent
    path = tmp_path / "a" / "2.png"
    image = Image.fromarray(palette, "P")
    image.putpalette([90, 90, 90, 200, 200, 200])
    image.save(path, transparency=0)
    found = decode(path, Shape(8, 1), lambda width, height: (0, 0, width, height))
    assert np.array_equal(found[0], palette * 200)


def test_one_bit_and_colours_of_print_are_read(tmp_path):
    assert np.array_equal(one_image(tmp_path, RAMP >= 128)[0], (RAMP >= 128) * 255)
    found = one_image(tmp_path, np.stack([RAMP] * 3, axis=-1), "CMYK", name="1.tif")
    assert np.abs(found.astype(int) - RAMP).max() <= 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8), "in mode F, with values from 0 to 1"),
        (np.full((8, 8), -5, np.int32), "in mode I, with values from -5 to -5"),
        (RAMP.astype(np.int32), "in mode I, with values from 0 to 255"),
    ],
)
def test_values_without_a_known_range_are_refused(values, words, tmp_path):
    with pytest.raises(DataError, match=f"the image .*1.tif is {words}.*\n.*8 or 16 bits"):
        one_image(tmp_path, values, name="1.tif")


def test_linked_folders_and_names_that_are_not_utf_8_are_read(tmp_path):
    write_images(tmp_path / "store", 8)
    write_images(tmp_path / "data", 4)
    (tmp_path / "data" / "cat" / "more").symlink_to(tmp_path / "store")
    (tmp_path / "data" / "cat" / "round").symlink_to(tmp_path / "data" / "cat")
    os.rename(
        os.fsencode(tmp_path / "data" / "dog" / "1.png"), os.fsencode(tmp_path / "data" / "dog") + b"/caf\xe9.png"
    )
    source = ImageFolder(str(tmp_path / "data"), ["cat", "dog"])
    assert source.arrays["labels"].tolist() == [0] * 10 + [1] * 2
    assert len(source.describe()["sha256"]) == 64
    rows = Small(data={"train": str(tmp_path / "data")}, size=8).transform(
        source.read(np.arange(12)), RowRandom(np.arange(12, dtype=np.uint64)), "train"
    )
    assert rows["pixel_values"].shape == (12, 3, 8, 8)


def test_pages_are_refused_and_an_animation_gives_its_first_picture(tmp_path):
    more = [Image.fromarray(255 - RAMP)]
    assert np.array_equal(one_image(tmp_path, RAMP, name="1.gif", save_all=True, append_images=more)[0], RAMP)
    with pytest.raises(DataError, match=r"1\.tif is a TIFF with 2 pages: it must have one page"):
        one_image(tmp_path, RAMP, name="1.tif", save_all=True, append_images=more)
