"""Functions of ops over MLX arrays: each takes ``Operands`` and gives the call's outputs."""
