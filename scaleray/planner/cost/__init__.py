"""Cost of one step on a layout: memory, compute, communication, and the uncertainty of each."""
