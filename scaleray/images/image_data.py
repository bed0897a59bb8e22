"""Folders of images as the data of a workload: sources by split, the transform that decodes them, and pixels for the
model.

Files are decoded where rows are read, in Ray tasks. Cropping and mirroring depend on the row's seed; evaluations always
use the centre.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scaleray.common.installed import library
from scaleray.data import TRAIN
from scaleray.errors import ConfigError, DataError, first_line
from scaleray.images.image_folder import FILE, ImageFiles, ImageFolder, class_names, file_names, images_at

Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge in pixels."""
RATIOS = (3 / 4, 4 / 3)
"""Smallest and largest aspect ratio (width to height) of a random crop, as in Szegedy et al. 2014, arXiv:1409.4842."""
MODES = {1: "L", 3: "RGB"}
ALPHA = ("RGBA", "RGBa", "LA", "La", "PA")


@dataclass(frozen=True)
class Shape:
    """Shape of decoded images: `size` pixels high and wide, with 1 (grey) or 3 (red, green, blue) channels."""

    size: int
    channels: int


def decode(path: Path, shape: Shape, box: Any) -> np.ndarray:
    """Decode the crop of an image given by `box`, a function of its width and height, as uint8 (channels, size, size).

    Raises DataError, with the path, if the file cannot be read.
    """
    pillow = library("PIL.Image", extra="images", wanted_by="a folder of images")
    try:
        with pillow.open(path) as image:
            converted = _converted(image, MODES[shape.channels])
            piece = converted.resize((shape.size, shape.size), pillow.Resampling.BILINEAR, box=box(*converted.size))
    except DataError as exc:
        raise DataError(f"the image {path}", exc.found, exc.allowed, exc.hint) from None
    except Exception as exc:  # pillow's formats raise various errors, including SyntaxError
        raise DataError(
            "the image", str(path), f"it cannot be read: {first_line(exc)}", "replace it, or remove it from the folder"
        ) from exc
    pixels = np.asarray(piece, np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _converted(image: Any, mode: str) -> Any:
    """Convert the image to one of MODES: 16 bits become value / 257, transparency is put over black, and an animation
    becomes its first frame.

    Raises DataError for a mode whose values have no known range, or for several pages.
    """
    if image.format == "TIFF" and image.n_frames > 1:
        raise DataError("", f"a TIFF with {image.n_frames} pages", "it must have one page", "write one file per page")
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = np.asarray(image).astype(np.uint32)
        image = _from_array(((values + 128) // 257).astype(np.uint8))
    elif image.mode.startswith("I") or image.mode == "F":
        raise _no_range(image.mode, np.asarray(image))
    elif image.mode in ALPHA or "transparency" in image.info:
        pixels = np.asarray(image.convert("RGBA")).astype(np.uint16)
        image = _from_array(((pixels[..., :3] * pixels[..., 3:] + 127) // 255).astype(np.uint8))
    return image.convert(mode)


def _from_array(values: np.ndarray) -> Any:
    return library("PIL.Image", extra="images", wanted_by="a folder of images").fromarray(values)


def _no_range(mode: str, values: np.ndarray) -> DataError:
    return DataError(
        "",
        f"in mode {mode}, with values from {values.min():g} to {values.max():g}",
        "values must have 8 bits, or 16 unsigned bits",
        "write it with 8 or 16 bits, scaled to that range, or read it in your own Dataset",
    )


def central_box(width: int, height: int, *, share: float) -> Box:
    """Central square whose edge is `share` of the image's shorter edge."""
    edge = min(width, height) * share
    left, upper = (width - edge) / 2, (height - edge) / 2
    return left, upper, left + edge, upper + edge


def random_box(width: int, height: int, *, areas: tuple[float, float], numbers: np.ndarray) -> Box:
    """Crop with a random area (a share of the whole within `areas`), aspect ratio and position.

    numbers: four, uniform from 0 to 1. A crop that is wider or higher than the image is cut to its size.
    """
    area = width * height * (areas[0] + (areas[1] - areas[0]) * numbers[0])
    low, high = math.log(RATIOS[0]), math.log(RATIOS[1])
    ratio = math.exp(low + (high - low) * numbers[1])
    wide, tall = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, upper = (width - wide) * numbers[2], (height - tall) * numbers[3]
    return left, upper, left + wide, upper + tall


PIXELS = "pixel_values"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's channels, from 0 to 1, with which most weights were trained."""


class ImageData:
    """Folders by split, each with one folder per class.

    data: {train: folder, val: folder, ...}. size: height and width of the model's input. crop: smallest and largest
    share of an image for random crops in training; None stretches the whole image. flip: whether training mirrors
    images at random. middle: share of the shorter edge for the central crop in evaluation, if training uses crops.
    channels: 3, or 1 for grey. mean, std: statistics of the channels, for the model's input. classes: names in order;
    None sorts the names in the training folder. order: default order of the names.
    """

    def __init__(
        self,
        data: Mapping[str, str],
        *,
        size: int = 224,
        crop: Sequence[float] | None = (0.25, 1.0),
        flip: bool = True,
        middle: float = 0.875,
        channels: int = 3,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        classes: Sequence[Any] | None = None,
        order: Callable[[list[str]], list[str]] = list,
    ) -> None:
        if not isinstance(data, Mapping) or TRAIN not in data:
            raise DataError("workload.args.data", data, "it must map splits to folders, including train")
        if crop is not None and not (len(crop) == 2 and 0 < crop[0] <= crop[1] <= 1):
            raise ConfigError("workload.args.crop", list(crop), "it must be two shares from 0 to 1, such as [0.25, 1]")
        if channels not in MODES:
            raise ConfigError("workload.args.channels", channels, "it must be 1 (grey) or 3")
        if size < 1 or not 0 < middle <= 1:
            raise ConfigError("workload.args.size", size, "size must be at least 1, and middle between 0 and 1")
        # absolute immediately, since workers and tasks run in other directories
        self.folders = {name: str(Path(folder).expanduser().absolute()) for name, folder in data.items()}
        self.shape, self.flip, self.middle = Shape(size, channels), flip, middle
        self.crop = None if crop is None else (float(crop[0]), float(crop[1]))
        self.mean = tuple(mean or (MEAN if channels == 3 else (0.5,)))
        self.std = tuple(std or (STD if channels == 3 else (0.5,)))
        if len(self.mean) != channels or len(self.std) != channels or min(self.std) <= 0:
            raise ConfigError(
                "workload.args.mean", [*self.mean, *self.std], f"mean and std need {channels} values each"
            )
        self._order = order
        self._classes = None if classes is None else [str(name) for name in classes]

    @property
    def classes(self) -> list[str]:
        """Names of the classes, ordered by number."""
        if self._classes is None:
            self._classes = self._order(class_names(self.folders[TRAIN]))
        return self._classes

    def datasets(self) -> dict[str, ImageFolder]:
        """Sources by split, with file names and labels."""
        return {name: ImageFolder(folder, self.classes) for name, folder in self.folders.items()}

    def at(self, path: str) -> ImageFiles | None:
        """Source of the images in a folder other than the splits; None if there are none."""
        return images_at(path, self.classes)

    def transform(self, rows: Mapping[str, Any], rng: Any, split: str) -> dict[str, Any]:
        """Replace the rows' files with their images as `pixel_values`, uint8 (rows, channels, size, size).

        Files of other splits, as in predictions, are paths relative to the current folder.
        """
        folder = Path(self.folders.get(split, ""))
        files = file_names(rows[FILE])
        numbers = rng.random(5) if split == TRAIN and (self.crop or self.flip) else np.zeros((len(files), 5))
        images = np.empty((len(files), self.shape.channels, self.shape.size, self.shape.size), np.uint8)
        for image, file, drawn in zip(images, files, numbers, strict=True):
            image[:] = decode(folder / file, self.shape, self._box(split, drawn))
            if split == TRAIN and self.flip and drawn[4] < 0.5:
                image[:] = image[:, :, ::-1].copy()
        return {**{name: column for name, column in rows.items() if name != FILE}, PIXELS: images}

    def pixels(self, images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Images as model input: (values / 255 - mean) / std."""
        mean, std = (
            (torch.tensor(values, dtype=torch.float64) * 255).view(1, -1, 1, 1).to(images.device, dtype)
            for values in (self.mean, self.std)
        )
        return (images.to(dtype) - mean) / std

    def _box(self, split: str, numbers: np.ndarray) -> Any:
        if self.crop is None:
            return lambda width, height: (0, 0, width, height)
        if split == TRAIN:
            return partial(random_box, areas=self.crop, numbers=numbers)
        return partial(central_box, share=self.middle)
