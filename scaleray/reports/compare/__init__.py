"""What differs between recorded runs."""
