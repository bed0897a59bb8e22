"""Parts of the strategies whose replicas train separately and synchronise occasionally."""
