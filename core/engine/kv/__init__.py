"""KV cache bookkeeping: blocks, prefixes and page tables as integers; the memory itself is the backend's."""

from .allocator import BlockCopy, BlockTable, KVAllocator, PagedAllocator, PrefixHit, find_allocator
from .block_pool import NULL_BLOCK, BlockPool, PoolStats
from .cache_group import CacheGroup
from .prefix_index import HashChain, PrefixIndex

__all__ = [
    "NULL_BLOCK",
    "BlockCopy",
    "BlockPool",
    "BlockTable",
    "CacheGroup",
    "HashChain",
    "KVAllocator",
    "PagedAllocator",
    "PoolStats",
    "PrefixHit",
    "PrefixIndex",
    "find_allocator",
]
