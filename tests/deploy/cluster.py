"""A cluster for Helm's `lookup`: an HTTP server that returns the objects applied to it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import helm_python

from tests.deploy.chart import NAMESPACE, Object, Rendered, render

KUBECONFIG: Final = """
apiVersion: v1
kind: Config
current-context: test
clusters: [{{name: test, cluster: {{server: "{url}"}}}}]
contexts: [{{name: test, context: {{cluster: test, user: test}}}}]
users: [{{name: test, user: {{}}}}]
"""
# The path of each kind's API, and the kind's name in paths.
_KINDS: Final = {
    "Secret": ("/api/v1", "secrets"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "LeaderWorkerSet": ("/apis/leaderworkerset.x-k8s.io/v1", "leaderworkersets"),
}


class Cluster:
    """The objects applied to a cluster, by kind and name, and the connection for Helm."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        cluster = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, body = cluster.answer(self.path.partition("?")[0])
                text = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                """Logs nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.config = helm_python.Config(
            kubeconfig_content=KUBECONFIG.format(url=self.url), namespace=NAMESPACE
        )

    def answer(self, path: str) -> tuple[int, Object]:
        known: dict[str, Object] = {
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        }
        for kind, (where, plural) in _KINDS.items():
            known[where] = _resource(kind, where, plural)
            for (of, name), one in self.objects.items():
                if of == kind:
                    known[f"{where}/namespaces/{NAMESPACE}/{plural}/{name}"] = one
        if path in known:
            return 200, known[path]
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {}}
        return 404, {**status, "reason": "NotFound", "code": 404}

    def upgrade(self, **values: Any) -> Rendered:
        release = render(values, cluster=self.config)
        for one in release.of(*_KINDS):
            self.objects[one["kind"], one["metadata"]["name"]] = one
        return release


def _resource(kind: str, where: str, plural: str) -> Object:
    resource = {
        "name": plural,
        "singularName": kind.lower(),
        "namespaced": True,
        "kind": kind,
        "verbs": ["get", "list"],
    }
    version = where.removeprefix("/apis/").removeprefix("/api/")
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": [resource],
    }


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    thread = threading.Thread(target=cluster.server.serve_forever, daemon=True)
    thread.start()
    yield cluster
    cluster.config.close()
    cluster.server.shutdown()
    thread.join()
