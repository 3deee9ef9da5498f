"""The disaggregation backend for SGLang: `--disaggregation-transfer-backend kvxfer`.

SGLang loads `plugin.py` by an entry point of this package. Only `plugin.py` and `backend.py` import
SGLang; the rest is plain and tested without it.
"""
