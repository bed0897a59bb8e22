"""MLflow: where runs are recorded, and the one process that writes them."""
