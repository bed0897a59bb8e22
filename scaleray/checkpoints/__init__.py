"""Sharded checkpoints: written during training, verified by hash, readable on any number of workers."""
