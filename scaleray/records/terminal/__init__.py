"""Output on the terminal, live and at the end."""
