"""Parts beside the collectives: what was sent, in which order, and on which thread."""
