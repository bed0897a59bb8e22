"""`scaleray sweep`: many trainings with other settings, and what they say together."""
