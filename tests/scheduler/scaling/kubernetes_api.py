"""The scale subresource of the Kubernetes API, as an HTTP server of the tests.

It does what the API server does, as far as a client could notice: group, version, plural and name
choose the object, a PUT with another resourceVersion than the object's is a 409, a replica count of
0 is left out, errors are Status objects, and a token is required.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from kvxfer.web.listener import bind, url_of
from verify.polling import eventually

TOKEN = "token of the service account"
PATH = "/apis/{group}/{version}/namespaces/{namespace}/{plural}/{name}/scale"


class KubernetesApi:
    """Objects that can be scaled, by path; `writes` are the counts that were accepted."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, ...], dict[str, int]] = {}
        self.writes: list[tuple[str, int]] = []
        self.conflicts = 0
        self.fail_with: int | None = None
        self.read_only: set[str] = set()
        self.app = FastAPI()
        self.app.get(PATH)(self._get)
        self.app.put(PATH)(self._put)
        self.url = ""

    def add(
        self,
        name: str,
        replicas: int,
        *,
        kind: tuple[str, str, str] = ("apps", "v1", "deployments"),
    ) -> None:
        group, version, plural = kind
        self.objects[group, version, "llm", plural, name] = {"replicas": replicas, "version": 1}

    def touch(self, name: str) -> None:
        """Changes the object in some other way, as its status changes all the time."""
        self._find(name)["version"] += 1

    def replicas(self, name: str) -> int:
        return self._find(name)["replicas"]

    def _find(self, name: str) -> dict[str, int]:
        return next(found for path, found in self.objects.items() if path[-1] == name)

    async def _get(self, request: Request) -> Any:
        return self._answer(request)

    async def _put(self, request: Request) -> Any:
        body = await request.json()
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        if request.path_params["name"] in self.read_only:
            return status(403, "Forbidden")
        found = self.objects[self._key(request)]
        if body["metadata"].get("resourceVersion") not in (None, str(found["version"])):
            self.conflicts += 1
            return status(409, "Conflict")
        assert (body["apiVersion"], body["kind"]) == ("autoscaling/v1", "Scale")
        found["replicas"] = body["spec"]["replicas"]
        found["version"] += 1
        self.writes.append((request.path_params["name"], found["replicas"]))
        return self._answer(request)

    def _key(self, request: Request) -> tuple[str, ...]:
        parts = ("group", "version", "namespace", "plural", "name")
        return tuple(request.path_params[part] for part in parts)

    def _refusal(self, request: Request) -> JSONResponse | None:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return status(401, "Unauthorized")
        if self.fail_with is not None:
            return status(self.fail_with, "Forbidden")
        if self._key(request) not in self.objects:
            return status(404, "NotFound")
        return None

    def _answer(self, request: Request) -> Any:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        found = self.objects[self._key(request)]
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {
                "name": request.path_params["name"],
                "namespace": request.path_params["namespace"],
                "uid": "6a1f4ed4-5c0e-4a3a-9d0a-0f1c5a4c6d2b",
                "resourceVersion": str(found["version"]),
            },
            "spec": {"replicas": found["replicas"]} if found["replicas"] else {},
            "status": {"replicas": found["replicas"], "selector": "app=llm"},
        }


def status(code: int, reason: str) -> JSONResponse:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason}
    return JSONResponse({**body, "code": code}, code)


@asynccontextmanager
async def running(api: KubernetesApi) -> AsyncIterator[KubernetesApi]:
    listener = bind("127.0.0.1", 0)
    api.url = url_of(listener)
    server = uvicorn.Server(uvicorn.Config(api.app, log_config=None, lifespan="off"))
    task = asyncio.create_task(server._serve([listener]))
    try:
        await eventually(lambda: server.started)
        yield api
    finally:
        server.should_exit = True
        await task
