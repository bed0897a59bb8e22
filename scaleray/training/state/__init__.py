"""The whole state of a training: saving, restoring and pausing it."""
