"""Traces of requests through router, control plane and workers, as OpenTelemetry's spans.

`span.py` is what code that is traced uses; it imports nothing of OpenTelemetry, and where nothing
is traced costs one look at a context variable. `tracer.py` and `setup.py` are for the start of a
process, `asgi.py` for its HTTP server, and `otlp.py` reads what exporters send.
"""
