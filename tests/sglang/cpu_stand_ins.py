"""Lets SGLang from PyPI be imported without CUDA, by empty packages for kernels that a CPU never
runs, and makes its attention on a CPU read windows from their pool. scripts/test-sglang installs
this file into the environment of these tests."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

PACKAGES = ("sgl_kernel", "IPython")


class _Nothing:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Empty(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 (a module's attribute)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, Finder, is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        pass


sys.meta_path.append(Finder)  # type: ignore[arg-type]

_ATTENTION = "sglang.srt.layers.attention.torch_native_backend"


class _AttentionLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        backend = module.TorchNativeAttnBackend
        for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
            setattr(backend, name, _in_window_pool(getattr(backend, name)))


def _in_window_pool(run: Any) -> Any:
    """Corrects the attention of SGLang 0.5.23, which writes K and V of a window to their place in
    the pool of windows, but reads them there at their place in the other pool."""

    def translated(
        self: Any,
        query: Any,
        output: Any,
        keys: Any,
        values: Any,
        tokens: Any,
        *rest: Any,
        **more: Any,
    ) -> Any:
        windows = (
            self.token_to_kv_pool.swa_kv_pool.k_buffer if self.use_sliding_window_kv_pool else ()
        )
        if any(keys.data_ptr() == of_layer.data_ptr() for of_layer in windows):
            tokens = self.token_to_kv_pool.translate_loc_from_full_to_swa(tokens)
        return run(self, query, output, keys, values, tokens, *rest, **more)

    return translated


class AttentionFinder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == _ATTENTION else None
        if spec is not None and spec.loader is not None:
            spec.loader = _AttentionLoader(spec.loader)
        return spec


sys.meta_path.insert(0, AttentionFinder)  # type: ignore[arg-type]
