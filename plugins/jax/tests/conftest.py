"""Four devices, quick compilation and few sizes of steps, set before JAX is imported."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ.setdefault("ENGINE_JAX_BUCKETS", "128,512")
