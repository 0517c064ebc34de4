"""Models judged by the text that they give probabilities to: perplexity, and divergence of two models."""
