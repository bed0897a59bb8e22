"""Checks of a cluster before training on it, as pure functions of measurements."""
