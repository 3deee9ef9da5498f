"""A whole cluster under load while its processes are killed, drained, added and moved."""
