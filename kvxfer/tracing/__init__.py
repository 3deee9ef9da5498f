"""Traces of requests through router, control plane and workers, as OpenTelemetry's spans.

Traced code uses `span.py`, which imports nothing of OpenTelemetry; if nothing is traced, it costs
one look at a context variable. `tracer.py` and `setup.py` are for the start of a process, `asgi.py`
for its HTTP server, and `otlp.py` reads what exporters send.
"""
