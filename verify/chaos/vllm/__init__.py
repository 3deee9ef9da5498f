"""A disaggregated vLLM under load, whose processes are killed and frozen."""
