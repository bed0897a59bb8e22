"""GPUs, networks and clusters: kinds, data sheets, and how a user names them."""
