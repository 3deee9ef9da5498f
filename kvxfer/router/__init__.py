"""`kvxfer router`: OpenAI's API in front of prefill and decode engines.

It uses the control plane by its REST API alone, as a router of anybody else would.
"""
