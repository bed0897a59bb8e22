"""Scaling curves: points with intervals, laws, predictions and limits."""
