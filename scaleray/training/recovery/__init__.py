"""Recovery of a training from its workers' memory: a lost worker is replaced, and no step is lost."""
