"""Parts of a model or a loss that know of the degrees in `parallel`: a worker's tokens of a sequence, and experts."""

from scaleray.parallel.context import part, positions

__all__ = ["part", "positions"]
