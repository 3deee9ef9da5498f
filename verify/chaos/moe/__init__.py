"""MoE groups whose ranks are killed and frozen at every phase of a step."""
