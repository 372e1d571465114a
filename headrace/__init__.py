"""What a person runs and imports: the CLI, the Python client, the local stack."""
