"""Worker side of a study: rungs of the ladder, and the turns on them."""
