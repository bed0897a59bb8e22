"""`scaleray promote`: register a trained model in MLflow with its evidence, check it, and roll it back."""
