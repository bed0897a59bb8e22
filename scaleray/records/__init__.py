"""Frozen results that cross processes and are written to files. No torch, no Ray."""
