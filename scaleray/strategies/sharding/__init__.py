"""Parts of FSDP: units, unsharding, counted collectives, and models built in pages."""
