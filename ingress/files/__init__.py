"""Files of callers: what batches read and write."""
