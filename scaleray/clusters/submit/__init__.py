"""Jobs on remote clusters: check compatibility, upload code, and follow the job to its result."""
