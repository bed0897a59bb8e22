"""Contract between strategies and the training loop, and the mesh that a strategy is given."""
