"""`scaleray path`: the way from a baseline to a promoted model, one command after another."""
