"""`scaleray plan`: question, answer, config and record of a plan."""
