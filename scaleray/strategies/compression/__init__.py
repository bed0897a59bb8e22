"""Compressed gradients: the DDP hook, the codecs, and the choice among them."""
