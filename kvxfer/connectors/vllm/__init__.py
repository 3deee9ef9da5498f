"""The KV connector for vLLM.

`--kv-transfer-config '{"kv_connector": "KvxferConnector",
"kv_connector_module_path": "kvxfer.connectors.vllm.connector", ...}'`. Only `connector.py` and
`caches.py` import vLLM or torch; the rest is plain and tested without them.
"""
