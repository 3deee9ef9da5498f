"""One model over several processes, each with some of its experts (`kvxfer.moe`).

Every rank computes attention and answers its own prompts; all take the steps of the group together.
`SpreadExperts` (`spread`) computes experts wherever they are, `rank` is the process of a rank, and
`ExpertRanks` (`ranks`) starts the processes and collects the answers. The model continues when a
process dies.
"""
