"""`scaleray verify` and `scaleray check`: whether distributed training is the training of one process."""
