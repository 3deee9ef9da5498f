"""Updates of a live vLLM's weights: its weight transfer backend `kvxfer`."""
