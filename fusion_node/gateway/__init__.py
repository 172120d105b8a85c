"""HTTP for the tools people already have: the OpenAI-compatible API."""
