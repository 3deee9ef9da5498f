"""An extension of vLLM's workers, for tests: `--worker-extension-cls weight_faults.Faults`."""

from __future__ import annotations

from typing import Any


class Faults:
    def fail_halfway(self: Any) -> None:
        """Makes the next update fail after half of the weights."""
        from kvxfer.connectors.vllm.weight_transfer import engine

        real = engine.windows_over

        def half(*args: Any) -> Any:
            windows = list(real(*args))
            yield from windows[: len(windows) // 2]
            raise OSError("no more weights")

        engine.windows_over = half

    def addresses(self: Any) -> list[int]:
        model = self.model_runner.get_model()
        return [each.data_ptr() for each in (*model.parameters(), *model.buffers())]
