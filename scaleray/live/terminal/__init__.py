"""Displays of an active run: on a terminal, in a notebook and on the watch page."""
