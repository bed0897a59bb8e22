"""Set-up of a training, in a fixed order: from a job to a model that can take steps."""
