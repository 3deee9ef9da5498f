"""Simulations on virtual time, each from one seed."""
