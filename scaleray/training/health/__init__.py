"""Observers of a training: progress, failures, memory, time, and the node."""
