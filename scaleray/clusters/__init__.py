"""Machines for training: their files, checks, job submission, and local clusters."""
