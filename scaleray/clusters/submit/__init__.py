"""Jobs on a remote cluster: upload, compatibility and result."""
