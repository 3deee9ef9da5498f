"""One model over several processes, each with a part of every layer (`kvxfer.reference.shards`).

`TensorParallelModel` (`model`) is rank 0: it tells the others what to run (`followers`, `follower`)
and takes part in it. `GroupRunner` (`runner`) runs requests over it, and updates of its weights
between two steps.
"""
