"""Measurements that are run by hand, from the root of the repository: `python -m benchmarks.NAME`."""
