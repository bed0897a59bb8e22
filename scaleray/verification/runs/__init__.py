"""The runs that verify compares, and the probe that records them."""
