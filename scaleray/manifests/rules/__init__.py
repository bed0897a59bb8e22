"""What must hold of manifests beyond their schema: the operator's own rules, and those of a locked door."""
