"""The benchmark of verdicts (`verdicts.py`): faults, the trainings in which they are planted, and what came of them."""
