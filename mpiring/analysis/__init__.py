"""Interpreters that look at a schedule instead of running it."""
