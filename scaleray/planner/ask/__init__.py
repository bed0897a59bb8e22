"""`scaleray plan`: the question, answer, config and record of a plan."""
