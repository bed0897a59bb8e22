"""The command `profile`, which finds a training's bottleneck from a short training or a recorded run."""
