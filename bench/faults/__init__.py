"""Injected faults: a fleet of real processes, a load whose every answer is known in advance, and the account of both."""
