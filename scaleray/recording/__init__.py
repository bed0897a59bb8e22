"""Recording in MLflow: storage of runs, and the one process that writes them."""
