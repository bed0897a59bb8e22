"""Set-up of a training: from a job to a model that can take steps, in one order."""
