"""Contract between strategies and the training loop, including the mesh for a strategy."""
