"""Measuring the gradient noise scale while training."""
