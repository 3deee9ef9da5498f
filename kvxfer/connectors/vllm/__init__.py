"""The KV connector for vLLM.

`--kv-transfer-config '{"kv_connector": "KvxferConnector",
"kv_connector_module_path": "kvxfer.connectors.vllm.connector", ...}'`. The state
machines (`scheduler.py`, `pull.py`, `worker.py`, …) are plain and tested without vLLM.
"""
