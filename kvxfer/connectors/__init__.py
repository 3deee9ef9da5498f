"""Connectors: kvxfer as the KV transfer of inference engines."""
