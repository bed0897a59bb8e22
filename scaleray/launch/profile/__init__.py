"""The command `profile`: find the bottleneck of a training, from a short training or a recorded run."""
