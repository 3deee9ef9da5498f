"""KV cache transfer: layouts, plans, the block pool, and sessions between two workers."""
