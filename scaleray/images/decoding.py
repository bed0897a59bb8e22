"""Decoding of image files to arrays of one size: cropping, resizing, flipping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scaleray.common.extras import library
from scaleray.errors import DataError, first_line

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
    """Convert the image to one of MODES: 16 bits as value / 257, transparency over black, first frame of an animation.

    Raises DataError for a mode whose values have no known range, and for several pages.
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
        "write it with 8 or 16 bits, scaled to their range, or read it in your own Dataset",
    )


def central_box(width: int, height: int, *, share: float) -> Box:
    """Central square whose edge is `share` of the image's shorter edge."""
    edge = min(width, height) * share
    left, upper = (width - edge) / 2, (height - edge) / 2
    return left, upper, left + edge, upper + edge


def random_box(width: int, height: int, *, areas: tuple[float, float], numbers: np.ndarray) -> Box:
    """Crop with a random area, as a share of the whole within `areas`, at a random aspect ratio and place.

    numbers: four, uniform from 0 to 1. A crop that is wider or higher than the image is cut to it.
    """
    area = width * height * (areas[0] + (areas[1] - areas[0]) * numbers[0])
    low, high = math.log(RATIOS[0]), math.log(RATIOS[1])
    ratio = math.exp(low + (high - low) * numbers[1])
    wide, tall = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, upper = (width - wide) * numbers[2], (height - tall) * numbers[3]
    return left, upper, left + wide, upper + tall
