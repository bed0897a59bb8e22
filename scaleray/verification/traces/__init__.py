"""Traces of runs, and their comparison."""
