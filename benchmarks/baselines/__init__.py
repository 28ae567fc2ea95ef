"""Outrider beside what a user would pick instead: the same weights, prompts and threads in one run."""
