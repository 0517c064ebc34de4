"""The kernels' sources, OpenCL C 1.2."""
