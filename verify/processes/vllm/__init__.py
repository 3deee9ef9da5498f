"""vLLM as a process, with tiny models and prompts."""
