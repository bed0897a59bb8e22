"""Records of the collectives: content, order, and thread."""
