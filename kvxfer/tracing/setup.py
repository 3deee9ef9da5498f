"""Tracing as OpenTelemetry's environment variables set it: where spans go, and which of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kvxfer.control_plane import Addresses, Credentials
from kvxfer.errors import InvalidArgument, NotBuilt

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

    from kvxfer.tracing.tracer import Tracer

logger = logging.getLogger(__name__)

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HEADERS: Final = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
# A trace should be visible sooner than with OpenTelemetry's default of 5 s.
_DELAY_MS: Final = 1000


def is_installed() -> bool:
    """Whether the packages of `kvxfer[otel]` are installed."""
    try:
        return (
            find_spec("opentelemetry.sdk") is not None
            and find_spec("opentelemetry.exporter.otlp.proto.http") is not None
        )
    except ModuleNotFoundError:
        return False


def endpoint() -> str:
    """Returns the endpoint that spans go to; empty if nothing is traced."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none":
        return ""
    return next((url for name in _ENDPOINTS if (url := os.environ.get(name, "").strip())), "")


def start_tracing(
    service: str,
    instance_id: str = "",
    *,
    control_plane: str | None = None,
    credentials: Credentials | None = None,
) -> Tracer | None:
    """Returns a tracer if the environment names an endpoint, otherwise None.

    If that endpoint is the control plane itself, spans are sent with the `credentials` for it.
    Raises NotBuilt if the packages are missing, and InvalidArgument for an unsupported protocol.
    """
    url = endpoint()
    if not url:
        return None
    if not is_installed():
        raise NotBuilt(
            f"traces are to go to {url}, and OpenTelemetry is not installed: "
            "pip install 'kvxfer[otel]', or unset OTEL_EXPORTER_OTLP_ENDPOINT"
        )
    protocol = next((p for name in _PROTOCOLS if (p := os.environ.get(name))), "http/protobuf")
    if protocol != "http/protobuf":
        raise InvalidArgument(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; traces are sent by http/protobuf: "
            "name the collector's HTTP port, which usually is 4318"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from kvxfer.tracing.exporter import TroubleToldOnce
    from kvxfer.tracing.tracer import Tracer, provider_of

    options: dict[str, Any] = {}
    if _origin(url) in map(_origin, Addresses(control_plane).all):
        options = _with_credentials(credentials or Credentials.from_environment())
    provider = provider_of(resource(service, instance_id))
    delay = None if "OTEL_BSP_SCHEDULE_DELAY" in os.environ else _DELAY_MS
    provider.add_span_processor(
        BatchSpanProcessor(
            TroubleToldOnce(OTLPSpanExporter(**options), url), schedule_delay_millis=delay
        )
    )
    return Tracer(provider)


@contextlib.asynccontextmanager
async def tracing(
    service: str,
    instance_id: str = "",
    *,
    control_plane: str | None = None,
    credentials: Credentials | None = None,
    optional: bool = False,
) -> AsyncIterator[Tracer | None]:
    """Yields the result of start_tracing(); sends what is left on exit. `control_plane` and
    `credentials` default to those of ControlPlaneClient. `optional`: an error is only logged, for
    a process of another project whose variables may be meant for other spans."""
    tracer = None
    try:
        tracer = start_tracing(
            service, instance_id, control_plane=control_plane, credentials=credentials
        )
    except (NotBuilt, InvalidArgument) as error:
        if not optional:
            raise
        logger.warning("transfers are not traced: %s", error)
    try:
        yield tracer
    finally:
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def resource(service: str, instance_id: str = "") -> Resource:
    """Returns the service and instance that spans name; OTEL_SERVICE_NAME and
    OTEL_RESOURCE_ATTRIBUTES take precedence."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    own = {"service.name": service}
    if instance_id:
        own["service.instance.id"] = instance_id
    return Resource(own).merge(OTELResourceDetector().detect())


def _with_credentials(credentials: Credentials) -> dict[str, Any]:
    import requests

    options: dict[str, Any] = {
        name: str(path)
        for name, path in (
            ("certificate_file", credentials.ca_file),
            ("client_certificate_file", credentials.cert_file),
            ("client_key_file", credentials.key_file),
        )
        if path is not None
    }
    token = credentials.bearer()
    if token is not None and not any(os.environ.get(name) for name in _HEADERS):

        def authorize(request: requests.PreparedRequest) -> requests.PreparedRequest:
            request.headers["Authorization"] = f"Bearer {token()}"
            return request

        options["session"] = requests.Session()
        options["session"].auth = authorize
        options["session"].trust_env = False
    return options


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
