"""Cost of one step of a layout: memory, compute and communication, with their uncertainty."""
