"""MLflow's registry of models: versions, their aliases, and which of them an alias ought to name."""
