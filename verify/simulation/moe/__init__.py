"""Views of MoE groups on virtual time: the real state machine with simulated ranks."""
