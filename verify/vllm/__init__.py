"""vLLM as a process, and tiny models and prompts for it."""
