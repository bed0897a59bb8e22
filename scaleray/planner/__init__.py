"""Memory needs and speed of a training on a cluster that is not available yet: arithmetic only."""
