"""What every command does first and last: paths and names, the data, the conditions of what it measures, its folder."""
