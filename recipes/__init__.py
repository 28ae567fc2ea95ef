"""Scripts that make what the repository holds: the bundled model and the page of results."""
