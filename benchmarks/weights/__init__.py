"""Weight updates beside raw writes of the engine and gloo: `python -m benchmarks.weights`."""
