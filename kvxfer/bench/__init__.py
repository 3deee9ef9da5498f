"""`kvxfer bench`: what the engine moves between two processes, beside what the host allows."""
