"""The command line: ``engine generate``, ``chat``, ``tokenize``, ``bench``, ``doctor``; heavy imports come late."""

import gc

# A start makes a million objects that stay: looking for garbage among them after every few hundred takes a tenth of a second.
gc.set_threshold(100_000, 20, 50)
