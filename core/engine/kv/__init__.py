"""KV cache bookkeeping: blocks, prefixes and page tables as integers; the memory itself is the backend's."""

from .allocator import BlockCopy, BlockTable, KVAllocator, MappingAllocator, PrefixHit, Remap
from .block_pool import NULL_BLOCK, BlockPool, PoolStats
from .cache_group import RECURRENT_WINDOW, CacheGroup
from .contiguous import ContiguousAllocator
from .host_pool import HostPool, HostStats
from .length_predictor import LengthHistogram, LengthPredictor
from .paged import PagedAllocator
from .prefix_index import HashChain, PrefixIndex
from .registry import AllocatorManifest, AllocatorSpec, find_allocator, find_predictor
from .virtual import VirtualAllocator

__all__ = [
    "NULL_BLOCK",
    "RECURRENT_WINDOW",
    "AllocatorManifest",
    "AllocatorSpec",
    "BlockCopy",
    "BlockPool",
    "BlockTable",
    "CacheGroup",
    "ContiguousAllocator",
    "HashChain",
    "HostPool",
    "HostStats",
    "KVAllocator",
    "LengthHistogram",
    "LengthPredictor",
    "MappingAllocator",
    "PagedAllocator",
    "PoolStats",
    "PrefixHit",
    "PrefixIndex",
    "Remap",
    "VirtualAllocator",
    "find_allocator",
    "find_predictor",
]
