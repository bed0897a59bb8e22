"""Counting and recording of collectives: content, order, and thread."""
