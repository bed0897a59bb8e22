"""Jobs of a remote cluster: upload, compatibility and result."""
