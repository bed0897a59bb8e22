"""One step simulated task by task, for `plan explain step`."""
