"""What one step costs on a layout: memory, compute, communication, and the uncertainty of each."""
