"""Use a trained run's model: load, evaluate, predict and export it."""
