"""Machines to train on: files for them, checks of them, submission to them, and local clusters."""
