"""What watches a training: progress, failures, memory, time, and the node."""
