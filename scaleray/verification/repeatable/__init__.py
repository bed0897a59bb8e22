"""A workload that can be repeated on any number of workers, and what could make it differ."""
