"""What a worker measures of itself in every run: the time of its phases. Without it the weights are the same."""
