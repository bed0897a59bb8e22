"""Verdicts on compared runs: guarantees of strategies, precision, rounding and causes."""
