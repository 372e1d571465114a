"""The local stack: servers, processes, state and supervision of `headrace up`."""
