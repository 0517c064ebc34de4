"""The ops of the catalogue as launches of kernels. No torch function computes here: it only makes memory."""
