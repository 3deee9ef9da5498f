"""Second part of `make bench SUITE=gpu`: the reference engine on one GPU (docs/gpus.md)."""
