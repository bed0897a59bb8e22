"""Shared helpers, which import no other package of scaleray."""
