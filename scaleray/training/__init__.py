"""The worker: the loop that trains, and all that it is made of."""
