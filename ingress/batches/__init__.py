"""Batches: files of requests, run as detached work, and files of their answers. docs/api.md, docs/adr/0005."""
