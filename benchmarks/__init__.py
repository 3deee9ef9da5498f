"""Benchmarks that need more than the package has: Redis, vLLM, the processes of verify/."""
