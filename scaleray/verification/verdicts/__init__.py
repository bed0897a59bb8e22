"""Verdicts on compared runs: promises of strategies, precision, rounding and causes."""
