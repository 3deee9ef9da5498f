"""One model over several processes, each with a part of every layer (`kvxfer.reference.shards`).

`TensorParallelModel` (`model`) is rank 0: it sends commands to the others (`followers`, `follower`)
and runs them itself, too. `GroupRunner` (`runner`) runs requests over it, and updates of its
weights between two steps.
"""
