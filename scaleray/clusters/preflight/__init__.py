"""Checks of a cluster before training on it: pure evaluation of measurements."""
