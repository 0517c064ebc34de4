"""The prefix index: which block holds the cache of which tokens.

A full block's key is a chained hash, H(key of the block before, its tokens), so that equal keys mean equal tokens
from the start of the sequence on (vLLM, "Automatic Prefix Caching"). The hash is 256-bit BLAKE2b: prompts come from
strangers, and a collision would show one the cache of another.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct


class HashChain:
    """The keys of one sequence's full blocks, extended as its tokens become known.

    ``salt`` separates sequences whose cache differs for equal tokens (an adapter, a tenant).
    """

    def __init__(self, block_size: int, salt: bytes = b"") -> None:
        self.keys: list[bytes] = []
        self._block_size = block_size
        self._pack = Struct(f"<{block_size}I").pack
        self._root = blake2b(salt, digest_size=32).digest()

    def extend(self, token_ids: list[int], blocks: int) -> None:
        """Makes keys of the first ``blocks`` blocks of ``token_ids`` present. Tokens never change once hashed."""
        keys, size = self.keys, self._block_size
        parent = keys[-1] if keys else self._root
        for index in range(len(keys), blocks):
            tokens = token_ids[index * size : (index + 1) * size]
            parent = blake2b(parent + self._pack(*tokens), digest_size=32).digest()
            keys.append(parent)

    def fork(self, blocks: int) -> HashChain:
        """A chain of its own that begins with this one's first ``blocks`` keys."""
        child = HashChain(self._block_size)
        child._root = self._root
        child.keys = self.keys[:blocks]
        return child


class PrefixIndex:
    """Key -> block id, one block a key and one key a block."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def insert(self, key: bytes, block: int) -> None:
        """Registers a block. Where the key or the block is registered already, the first stays."""
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key

    def remove(self, block: int) -> None:
        del self._blocks[self._keys.pop(block)]

    def clear(self) -> None:
        self._blocks.clear()
        self._keys.clear()

    def lookup(self, keys: list[bytes]) -> list[int]:
        """The blocks of the longest registered run of ``keys`` from the first on."""
        found: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, keys: list[bytes]) -> list[int]:
        """The block of each key, or 0 for one that is not registered."""
        return [self._blocks.get(key, 0) for key in keys]

    def check(self) -> None:
        """Raises AssertionError where the two directions disagree."""
        assert {block: key for key, block in self._blocks.items()} == self._keys, "prefix index is not one to one"
