"""Measurements: what a round costs, and what this machine does to exactness."""
