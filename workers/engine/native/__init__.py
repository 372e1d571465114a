"""Our own kernels for the CPU: a whole step of the commonest decoders in one call, compiled once on each host."""
