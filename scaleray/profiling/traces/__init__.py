"""Analysis of torch.profiler traces: use of time on each rank, and collectives across ranks."""
