"""Differences between recorded runs."""
