"""Causes of a divergence: their classes, the experiments that separate them, and gradients taken apart."""
