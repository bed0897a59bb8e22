"""`scaleray doctor`: looks at the nodes of a cluster, or at this machine, before anything is trained there."""
