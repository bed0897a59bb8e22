"""Sharded checkpoints of a training: written beside it, proven by hash, read on any number of workers."""
