"""Triton kernels, a file a family. Values are widened to f32 when they are loaded and narrowed when they are stored."""
