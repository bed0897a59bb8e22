"""Uses of a trained run's model: load, evaluate, predict."""
