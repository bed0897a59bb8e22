"""Files of `cluster/`: a single table of versions and sizes, templates, and checks of the files."""
