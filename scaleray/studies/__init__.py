"""`scaleray study`: measurements of how a training scales, with fitted laws and reports, and comparisons of runs."""
