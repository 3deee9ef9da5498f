"""Three times as many requests as a fleet can serve."""
