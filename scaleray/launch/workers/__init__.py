"""Worker processes: in this process, under gloo, and how those of Ray fail and report."""
