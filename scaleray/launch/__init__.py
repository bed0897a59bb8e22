"""The driver: connect to Ray, launch the workers, and write the record of the run."""
