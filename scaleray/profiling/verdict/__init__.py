"""Verdict on a training: its limits, their cost, and the next thing to try."""
