"""The worker process: claims requests, runs the engine, sends tokens."""
