"""The command `profile`: a short training, or a recorded run, and what limits it."""
