"""`kvxfer router`: OpenAI's API in front of prefill and decode engines.

It uses only the control plane's REST API, as any other router would.
"""
