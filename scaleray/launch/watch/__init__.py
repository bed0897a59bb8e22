"""Watch live runs without disturbing them: `scaleray watch`."""
