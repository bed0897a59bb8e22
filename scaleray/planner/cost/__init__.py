"""Cost of one step with a layout: memory, compute, communication, and the uncertainty of each."""
