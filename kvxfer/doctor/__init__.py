"""`kvxfer doctor`: what this host has, and what it lacks."""
