"""Causes of a divergence: their classes, the experiments that distinguish them, and the decomposition of gradients."""
