"""Faults on purpose: a cluster, runs on it, what goes wrong with them, and the checks afterwards. See jobs/faults.py."""
