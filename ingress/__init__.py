"""The HTTP front door: admission, routing of models to versions, and relaying of token streams to clients."""
