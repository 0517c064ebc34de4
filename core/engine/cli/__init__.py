"""The command line: ``engine generate``, ``chat``, ``tokenize``, ``bench``, ``doctor``; heavy imports come late."""
