"""Derivation of all values from a config: learning-rate rules, schedules, shares, and consistency checks."""
