"""The reference engine as a worker: prefill or decode behind an HTTP API, with KV transfers."""
