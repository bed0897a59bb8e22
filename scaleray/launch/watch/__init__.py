"""Observation of live runs without disturbing them: `scaleray watch`."""
