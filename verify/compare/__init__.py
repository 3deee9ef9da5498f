"""Answers of a fleet compared with those of another server, or of another revision."""
