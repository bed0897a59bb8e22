"""The worker: the training loop and its parts."""
