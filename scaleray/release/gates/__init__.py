"""Gates between a trained model and production: what each asks of recorded evidence, and how sure its answer is."""
