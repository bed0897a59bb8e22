"""Scaling curves: points with intervals, laws, predictions, and what limits them."""
