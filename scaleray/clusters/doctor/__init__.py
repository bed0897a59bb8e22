"""`scaleray doctor`: check the nodes of a cluster, or this machine, before training there."""
