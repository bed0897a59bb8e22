"""Parts of the strategies whose replicas train apart and meet now and then."""
