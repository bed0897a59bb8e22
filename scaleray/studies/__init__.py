"""`scaleray study`: measurements of how a training scales, fitted laws and reports; and comparisons of runs."""
