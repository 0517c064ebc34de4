"""The text that the built-in demo model learns from, its training, and its examination."""
