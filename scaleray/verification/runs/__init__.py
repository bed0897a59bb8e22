"""Runs that verify compares, and the probe that records them."""
