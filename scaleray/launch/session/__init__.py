"""First and last steps of every command: paths and names, data, conditions of measurements, and its folder."""
