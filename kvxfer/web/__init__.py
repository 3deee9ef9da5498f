"""The parts of kvxfer's HTTP servers: sockets, TLS, tokens, limits, logs, answers."""
