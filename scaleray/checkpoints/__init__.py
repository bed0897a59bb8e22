"""Sharded checkpoints of a training: written during it, proven by hash, read on any number of workers."""
