"""Workers and their network, broken in mid-transfer."""
