"""Views of MoE groups on virtual time: the real state machine, among simulated ranks."""
