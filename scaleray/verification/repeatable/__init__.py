"""A workload that can be repeated on any number of workers, and checks of what could make it differ."""
