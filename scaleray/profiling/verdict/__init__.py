"""What limits a training, by how much, and what to try next."""
