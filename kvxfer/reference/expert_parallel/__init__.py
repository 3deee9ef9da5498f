"""One model over several processes, each with some of its experts (`kvxfer.moe`).

Attention is at every rank: each answers its own prompts, and all take the steps of the group
together. `SpreadExperts` (`spread`) computes experts wherever they are, `rank` is the process of a
rank, and `ExpertRanks` (`ranks`) starts the processes and collects the answers. The model goes on
when a process dies.
"""
