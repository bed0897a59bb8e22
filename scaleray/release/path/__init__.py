"""`scaleray path`: from a baseline to a promoted model, one command after another."""
