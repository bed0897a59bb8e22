"""One optimizer step, and evaluation: micro-batches, sums and counts, and what may go wrong in them."""
