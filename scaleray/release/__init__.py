"""From a trained model to a promoted one: gates, evidence, promotion, and paths of experiments."""
