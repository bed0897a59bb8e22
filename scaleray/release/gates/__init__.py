"""Gates between a trained model and production: their requirements on recorded evidence, and the confidence of their
answers."""
