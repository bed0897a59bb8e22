"""The gradient noise scale, and what it says about batch sizes."""
