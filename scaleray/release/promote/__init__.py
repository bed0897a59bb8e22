"""`scaleray promote`: a trained model into MLflow's registry with what shows that it may be there, checked and taken
back."""
