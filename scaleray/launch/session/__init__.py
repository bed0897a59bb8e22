"""First and last steps of every command: paths and names, the data, the conditions of its measurements, its folder."""
