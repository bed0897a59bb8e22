"""Image files to arrays of one size: decoding, cropping, resizing, flipping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scaleray.errors import DataError, first_line
from scaleray.extras import library

Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge in pixels."""
RATIOS = (3 / 4, 4 / 3)
"""Least and largest ratio of width to height of a random piece, as in Szegedy et al. 2014, arXiv:1409.4842."""
MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Shape:
    """What images become: `size` pixels high and wide, of 1 (grey) or 3 (red, green, blue) channels."""

    size: int
    channels: int


def decode(path: Path, shape: Shape, box: Any) -> np.ndarray:
    """The piece of an image that `box`, a function of its width and height, gives, as uint8 (channels, size, size).
    Raises DataError, with the path, for a file that cannot be read."""
    pillow = library("PIL.Image", extra="images", wanted_by="a folder of images")
    try:
        with pillow.open(path) as image:
            converted = image.convert(MODES[shape.channels])
            piece = converted.resize((shape.size, shape.size), pillow.Resampling.BILINEAR, box=box(*converted.size))
    except Exception as exc:  # each format of pillow raises errors of its own, SyntaxError among them
        raise DataError(
            "the image", str(path), f"it cannot be read: {first_line(exc)}", "replace it, or take it out of the folder"
        ) from exc
    pixels = np.asarray(piece, np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def central_box(width: int, height: int, *, share: float) -> Box:
    """The square in the middle whose edge is `share` of the shorter edge."""
    edge = min(width, height) * share
    left, upper = (width - edge) / 2, (height - edge) / 2
    return left, upper, left + edge, upper + edge


def random_box(width: int, height: int, *, areas: tuple[float, float], numbers: np.ndarray) -> Box:
    """A piece whose area is a random share of the whole within `areas`, of a random ratio and at a random place.

    numbers: four, uniform from 0 to 1. A piece that is wider or higher than the image is cut to it.
    """
    area = width * height * (areas[0] + (areas[1] - areas[0]) * numbers[0])
    low, high = math.log(RATIOS[0]), math.log(RATIOS[1])
    ratio = math.exp(low + (high - low) * numbers[1])
    wide, tall = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, upper = (width - wide) * numbers[2], (height - tall) * numbers[3]
    return left, upper, left + wide, upper + tall
