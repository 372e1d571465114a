"""The fleet simulator: the production's policies on a virtual clock, with a cost model in the place of GPUs.

It is part of the installed package, since `headrace simulate` and `headrace plan` are; its scenarios are in bench/fleet.
"""
