"""A trained run's model in use: load, evaluate, predict and export it."""
