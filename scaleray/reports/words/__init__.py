"""What the terminal and the page say in the same words."""
