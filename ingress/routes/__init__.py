"""The routes, one module per API family."""
