"""A run under way on a terminal, in a notebook and in the watch page."""
