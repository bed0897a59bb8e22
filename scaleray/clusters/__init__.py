"""Clusters for training: their files, checks, job submission, and clusters on this machine."""
