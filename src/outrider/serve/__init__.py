"""The OpenAI-compatible server: HTTP, schemas, streaming, metrics, the page."""
