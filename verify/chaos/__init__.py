"""Processes under load that are killed, frozen and cut off from their network."""
