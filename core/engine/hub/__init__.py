"""Models by name: what a name means, which file of a repository, its download, and what the cache of the hub holds."""

from .locate import Say, located, located_here, pull

__all__ = ["Say", "located", "located_here", "pull"]
