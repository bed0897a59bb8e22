"""The driver: connects to Ray, launches the workers, and sees a run through to its record."""
