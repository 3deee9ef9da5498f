"""The KV transfer as a Promela model, and its checks with Spin."""
