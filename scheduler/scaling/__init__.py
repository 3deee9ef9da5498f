"""Elastic scaling: the number of workers of each role that the load takes, and who starts them.

`decision` is pure; `autoscaler` measures, decides and, if it leads, has a backend apply it.
"""
