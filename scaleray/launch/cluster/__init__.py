"""A Ray cluster: connecting to it, starting a local head, and checking its capacity."""
