"""Models judged by the text that they give probabilities to: perplexity, divergence of two models, activations seen."""
