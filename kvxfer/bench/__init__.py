"""`kvxfer bench`: the engine between two processes, measured beside what their hosts allow."""
