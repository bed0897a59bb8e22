"""GPUs, networks and clusters: types, data sheets, and user input."""
