"""Parts of the strategies whose replicas train apart and synchronise occasionally."""
