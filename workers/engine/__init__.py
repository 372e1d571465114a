"""The continuous-batching engine. It knows nothing of NATS; scheduler, blocks and fairness know nothing of torch."""
