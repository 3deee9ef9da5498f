"""`make bench-gpu`, second part: the reference engine end to end on one GPU (docs/gpus.md)."""
