"""Sharded checkpoints of a training: written beside it, proven by hash, read on any number of workers."""

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.manifest import Manifest
from scaleray.checkpoints.saver import Saver

__all__ = ["Catalog", "Manifest", "Saver"]
