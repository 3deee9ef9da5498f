"""The demo: a whole cluster on one machine, compared token by token with a single process."""
