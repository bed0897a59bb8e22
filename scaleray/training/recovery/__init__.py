"""Recovery of a training in its workers' memory: a worker that is lost is replaced, and no step is."""
