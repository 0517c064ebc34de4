"""``engine bench-serve``: load for any OpenAI-compatible server, and what it makes of it."""
