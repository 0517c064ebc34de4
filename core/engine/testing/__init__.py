"""The conformance kit: what a backend must show before anyone relies on it.

``pytest --engine-backend NAME --mode support|test|perf|fuzz`` runs ``suite`` against any installed backend. The checks
themselves are plain functions that raise AssertionError and need no pytest: ``checks`` (an op's providers), ``memory`` (a
device's methods), ``models`` (whole programs).
"""
