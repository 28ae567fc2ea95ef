"""Outrider inside other engines: modules that vLLM and SGLang load by name. Importing one imports neither engine."""
