"""What every HTTP server of kvxfer is made of: sockets, TLS, tokens, limits, logs, answers."""
