"""Elastic scaling: how many workers of each role the load takes, and who brings that about.

`decision` is pure; `autoscaler` measures, decides and, where it leads, has a backend apply it.
"""
