"""Measurements that a worker takes in every run, such as the times of its phases. They do not affect the weights."""
