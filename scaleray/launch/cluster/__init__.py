"""A Ray cluster: the connection to it, a head of one's own, and whether it has room."""
