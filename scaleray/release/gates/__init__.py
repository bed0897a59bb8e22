"""Gates between a trained model and production: the requirements of each on recorded evidence, and the confidence of
its answer."""
