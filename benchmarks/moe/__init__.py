"""MoE dispatch and combine beside gloo, MPI and memcpy: `python -m benchmarks.moe`."""
