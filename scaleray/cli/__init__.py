"""Commands. Heavy libraries are imported inside each command, so that help and config checks start at once."""

from scaleray.cli.main import main

__all__ = ["main"]
