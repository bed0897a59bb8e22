"""Load, evaluate, predict with and export a trained run's model."""
