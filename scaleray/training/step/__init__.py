"""One optimizer step, and evaluation: micro-batches, sums and counts, and handling of their errors."""
