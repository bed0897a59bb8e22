"""Verdict on a training: its limits, their cost, and the next remedy to try."""
