"""Runs the project's programs as processes: starts, awaits, freezes, kills and reaps them."""
