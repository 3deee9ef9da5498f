"""The short way from a request's bytes to its endpoint, for requests that are as they should be.

FastAPI's own way finds out anew with each request what an endpoint takes; on the busiest routes
that takes as long as the work. Whatever is out of the ordinary still goes that way, so there is
one place that says what is wrong with a request.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import Request, Response
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from kvxfer.api.context import ControlPlaneDep, control_plane

_JSON: Final = "application/json"

Answer = Callable[[Request], Awaitable[Response | None]]


def plain_call(endpoint: Callable[..., Any], path_names: set[str]) -> Answer | None:
    """What answers the plain requests of an endpoint, and returns None for any other.

    None where the endpoint does not take a body, at most parts of its path beside it, and answer
    with a Response.
    """
    signature = inspect.signature(endpoint, eval_str=True)
    if signature.return_annotation is not Response:
        return None
    app_name, body_name, body_type, path = "", "", None, {}
    for name, parameter in signature.parameters.items():
        annotation = parameter.annotation
        if annotation == ControlPlaneDep:
            app_name = name
        elif name in path_names:
            path[name] = TypeAdapter(annotation).validate_python
        elif (
            body_type is None
            and parameter.default is parameter.empty
            and inspect.isclass(annotation)
            and issubclass(annotation, BaseModel)
        ):
            body_name, body_type = name, annotation
        else:
            return None
    if not app_name or body_type is None:
        return None
    read_body = body_type.model_validate_json

    async def answer(request: Request) -> Response | None:
        if request.headers.get("content-type") != _JSON:
            return None
        try:
            arguments: dict[str, Any] = {body_name: read_body(await request.body())}
            for name, validated in path.items():
                arguments[name] = validated(request.path_params[name])
        except (ValidationError, ClientDisconnect):
            return None
        arguments[app_name] = control_plane(request)
        response: Response = await endpoint(**arguments)
        return response

    return answer
