"""From a trained model to a promoted one: gates, evidence, promotion and the path of an experiment."""
