"""The plan of a weight update: slices of parameters, from training ranks to inference ranks.

A `WeightMap` (`maps`) says what the ranks of both sides hold. `plan_weights` (`schedule`) makes the
writes of it: a pure function, computed once for as many updates as follow. Nothing is moved here.
"""
