"""`kvxfer simulate`: a fleet on virtual time, with the real pairing and autoscaling code."""
