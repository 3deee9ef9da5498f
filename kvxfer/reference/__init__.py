"""The reference engine: a small paged inference engine, and how such an engine uses kvxfer.

Read in this order: `model` (what is computed), `kv_cache` (where KV lies), `runner` (prompt to
tokens), `worker` (the same with a transfer between prefill and decode).
"""
