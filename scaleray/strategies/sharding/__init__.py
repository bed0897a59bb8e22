"""Parts of FSDP: units, unsharding, counted collectives, and paged building of models."""
