"""The KV transfer as a Promela model, and what Spin has to say about it."""
