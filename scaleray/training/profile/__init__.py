"""Measurements that a worker takes in every run: the time of its phases. Without them the weights are the same."""
