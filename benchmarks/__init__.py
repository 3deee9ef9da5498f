"""Benchmarks with needs beyond the package: Redis, vLLM, the processes of verify/."""
