"""`scaleray study`: how a training scales, measured, fitted and shown; and comparisons of runs."""
