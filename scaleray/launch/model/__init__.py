"""What is done with the model of a run that has been trained: load, evaluate, predict."""
