"""Worker processes: in this process, as gloo processes or under Ray, and reports of their failures."""
