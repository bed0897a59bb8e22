"""A training's whole state: saved, restored, paused."""
