"""`scaleray sweep`: many trainings with different settings, and their joint result."""
