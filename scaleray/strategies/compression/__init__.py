"""Compressed gradients: the hook under DDP, the codecs, and the choice among them."""
