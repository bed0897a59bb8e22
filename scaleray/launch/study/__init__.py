"""A scaling study: its plan, its workers, what is known already, and its conclusions."""
