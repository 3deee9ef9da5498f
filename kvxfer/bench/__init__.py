"""`kvxfer bench`: what the engine moves between two processes, beside what their hosts allow."""
