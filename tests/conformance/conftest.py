"""The fronts of tests/ingress: the real application, fed by the test."""

from ..ingress.conftest import front, make, raw, shared_front, start_front

__all__ = ["front", "make", "raw", "shared_front", "start_front"]
