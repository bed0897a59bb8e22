"""What the terminal shows, live and at the end."""
