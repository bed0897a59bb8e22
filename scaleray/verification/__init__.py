"""`scaleray verify` and `scaleray check`: does distributed training equal the training of one process?"""
