"""Connect to a Ray cluster, start a local head, and check a cluster's capacity."""
