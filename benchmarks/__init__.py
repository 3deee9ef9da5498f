"""Benchmarks that need more than an installation: servers of their own, a load generator."""
