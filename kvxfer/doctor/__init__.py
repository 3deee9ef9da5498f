"""`kvxfer doctor`: what this host has, and what is missing for what."""
