"""Updates of a live vLLM's weights: its `kvxfer` weight transfer backend, for workers and trainers."""
