"""First and last steps of every command: paths, names, data, conditions of measurements, and its folder."""
