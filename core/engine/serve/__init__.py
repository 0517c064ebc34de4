"""``engine serve``: models behind OpenAI's HTTP protocol."""
