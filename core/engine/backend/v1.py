"""The backend contract, version 1: the only module of the core that a backend imports.

A backend is a ``Manifest`` found through the entry-point group ``engine.backends``. Its ``Device`` has eight methods; with
these alone every model runs, through the NumPy reference of each op. A backend becomes fast by offering ``Provider`` objects
for ops, and whole by offering ``compile(segment)``. Nothing here knows a request, a scheduler or a model.

Growth: descriptors gain named fields with defaults. An attribute that differs from its default is a *feature*; a provider
that does not name the feature is skipped. Defaults never change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from .collectives import CollectiveCall as CollectiveCall
from .collectives import Collectives as Collectives
from .collectives import CollectivesError as CollectivesError
from .collectives import CollectivesManifest as CollectivesManifest
from .collectives import Group as Group
from .collectives import collectives_of as collectives_of
from .optional import BlockAccess as BlockAccess
from .optional import VirtualMemory as VirtualMemory
from .optional import block_access_of as block_access_of
from .optional import compile_of as compile_of
from .optional import copy_in_all_of as copy_in_all_of
from .optional import copy_out_all_of as copy_out_all_of
from .optional import populate_of as populate_of
from .optional import providers_of as providers_of
from .optional import virtual_memory_of as virtual_memory_of
from .optional import watch_memory_of as watch_memory_of
from .sessions import RemapSession as RemapSession
from .sessions import Runs as Runs
from .sessions import Session as Session
from .sessions import SwapSession as SwapSession
from .sessions import SwapTicket as SwapTicket
from .sessions import Ticket as Ticket
from .tuning import Tuned as Tuned
from .tuning import Tuning as Tuning
from .tuning import tuning_of as tuning_of

if TYPE_CHECKING:
    from ..formats.codebooks import codebook as codebook
    from ..ops import OPS as OPS
    from ..program.execute import StepSession as StepSession
    from .host import available_memory as available_memory
    from .host import host_virtual_memory as host_virtual_memory
    from .host import host_zeros as host_zeros
    from .processors import find_processors as find_processors

API = "1.1"

Array = np.ndarray[Any, np.dtype[Any]]

# Storage tags. Host interchange is contiguous bytes with a tag; bf16 travels as uint16, fp8 as uint8.
HOST_DTYPES: Mapping[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "u32": np.dtype(np.uint32),
    "u8": np.dtype(np.uint8),
}


@dataclass(frozen=True)
class Dims:
    """Counts of one step: tokens, sequences, rows for the head, page-table width, block copies, history copies, history
    fills, bias entries, token masks, logprobs a row. Arrays are exactly this long, padding included where a device has
    buckets. T equals S only where every sequence has one token."""

    T: int = 0
    S: int = 0
    R: int = 0
    P: int = 0
    C: int = 0
    H: int = 0
    F: int = 0
    B: int = 0
    M: int = 0
    K: int = 0

    def of(self, shape: Sequence[int | str]) -> tuple[int, ...]:
        """A symbolic shape with this step's numbers; ``S+1`` and ``T*4`` are sizes, too."""
        return tuple(size if isinstance(size, int) else self._size(size) for size in shape)

    def _size(self, text: str) -> int:
        count: int = getattr(self, text[0])
        if len(text) == 1:
            return count
        return count + int(text[2:]) if text[1] == "+" else count * int(text[2:])


@dataclass(frozen=True)
class Value:
    """Something written once a step. ``dtype`` is a role (act, residual) until placement, then a storage tag or a
    packed-activation layout such as ``q8g32``."""

    id: int
    name: str
    shape: tuple[int | str, ...]
    dtype: str


class WeightRef(Protocol):
    """A weight by name: mapped tensors plus lazy concatenation, slicing and permutation of rows. Nothing is read before
    ``rows`` or ``dense``."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K] or [N] or [experts, N, K], rows (N) as outputs."""
        ...

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        """Raw blocks, uint8 [rows, row bytes], of the flattened leading axes; a view of the file where it can be."""
        ...

    def dense(self) -> Array:
        """The decoded weight, f32, in ``shape``."""
        ...

    def release(self) -> None:
        """It has been read; its file's pages need not stay in memory."""
        ...


@dataclass(frozen=True)
class StateSpec:
    """State that an op consumes in one version and yields in the next. ``kind``: k, v, k_scale, v_scale, history; tail and memory
    of recurrent layers (``engine.ops.recurrent``), f32 whatever a cache is kept in.
    ``group``: the cache group whose blocks are its first axis, or None."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    group: int | None = None


@dataclass(frozen=True)
class KVSpec:
    """What a layer's cache holds, without saying how it lies in memory. ``dtype``: f32, f16, bf16, int8 or
    (api 1.1) int16, like int8 whole numbers with a scale a token and head (``engine.ops.kv``), or fp8, numbers of E4M3 in the
    storage tag u8. ``latent``: values are a part of the keys, so that there is no state v, nor v_scale."""

    blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: str
    latent: bool = False


@dataclass(frozen=True)
class KVLayout:
    """A KV layout as named data: ``shapes(spec)`` gives kind -> (shape, storage tag) of one layer's state tensors, each
    with blocks as its first axis.

    ``from_plain(spec, kind, array)`` and ``to_plain`` (api 1.1) turn a tensor of the plain layout ([blocks, block_size,
    kv_heads, head_dim]; scales without the last axis) into this one and back. The conformance kit needs them to look into a
    cache, unless the shapes are the plain ones."""

    name: str
    dtypes: tuple[str, ...]
    shapes: Callable[[KVSpec], Mapping[str, tuple[tuple[int, ...], str]]]
    from_plain: Callable[[KVSpec, str, Array], Array] | None = None
    to_plain: Callable[[KVSpec, str, Array], Array] | None = None


@dataclass(frozen=True)
class Call:
    """One op call of a program. ``attrs`` holds only what differs from the op's defaults. A fused call carries the
    sequence that it stands for in ``parts``. ``scope`` (api 1.1): the part of the model that it belongs to, "embed",
    "layers.N", "layers.N.experts", "head" or nothing."""

    op: str
    inputs: Mapping[str, Value]
    outputs: tuple[Value, ...]
    weights: Mapping[str, WeightRef] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Call, ...] = ()
    scope: str = ""

    def attr(self, name: str) -> Any:
        """The attribute, or the op's default."""
        return self._all_attrs.get(name)

    @cached_property
    def _all_attrs(self) -> Mapping[str, Any]:
        """Looked up once, since each launch of a step asks for several."""
        from ..ops import OPS

        return {**OPS[self.op].attrs, **self.attrs}


def _at_once() -> None:
    """What was packed when it was asked for."""


@dataclass(frozen=True)
class Packed:
    """A weight in a provider's own layout. ``unpack`` gives the dense f32 weight back, for the conformance kit. A provider
    may go on packing after it has returned this: the ``WeightRef`` is read, and no step uses the handle, until ``ready``
    has returned."""

    handle: Any
    nbytes: int
    unpack: Callable[[], Array]
    ready: Callable[[], None] = _at_once


@dataclass
class Frame:
    """What an fn sees of a step: the counts, the device values by id, and the session's states by name."""

    dims: Dims
    values: dict[int, Any]
    states: dict[str, Any]


StepFn = Callable[[Frame], None]


@runtime_checkable
class Provider(Protocol):
    """An implementation of one op on a device.

    ``features`` names the attributes it honours beyond the defaults, and the optional arguments it takes; ``layouts`` the
    KV layouts it reads or writes (empty for ops without KV); ``batch_invariant`` says that a row's result never depends on
    the other rows. Providers of one ``packer`` share packed weights.
    """

    @property
    def op(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def packer(self) -> str: ...
    @property
    def features(self) -> frozenset[str]: ...
    @property
    def layouts(self) -> frozenset[str]: ...
    @property
    def batch_invariant(self) -> bool: ...

    def supports(self, call: Call) -> str | None:
        """None, or a sentence that says why not."""
        ...

    def wants(self, call: Call) -> Mapping[str, str]:
        """Input name -> packed-activation layout it asks for; a ``quantize`` call is inserted for each."""
        ...

    def pack(self, ref: WeightRef, uses: Sequence[str], progress: Callable[[int], None]) -> Packed:
        """The weight in this provider's layout, fit for all ``uses`` (op names). ``progress`` takes bytes read, at
        the latest within ``ready``."""
        ...

    def bind(self, bound: BoundCall, limits: Limits) -> StepFn:
        """An fn, for steps within the limits, that reads ``frame.values`` of the call's inputs and sets those of its
        outputs. It reads no device value on the host."""
        ...


@dataclass(frozen=True)
class BoundCall:
    """A call with its provider, its packed weights by argument name, and the KV layout of its states."""

    call: Call
    provider: Provider
    weights: Mapping[str, Packed]
    layout: str | None = None


@dataclass(frozen=True)
class Segment:
    """A maximal run of calls on one place: "host", or "device", or the name of one of several devices. ``inputs`` come from
    outside it, ``outputs`` are used outside it."""

    name: str
    place: str
    calls: tuple[BoundCall, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class Limits:
    """Maximum sizes of a session's steps; values are allocated at these. ``decode_buckets`` (api 1.1): the sizes of T and S
    that decode steps are padded to, as ``DeviceInfo`` has them; empty where they are not."""

    dims: Dims
    max_context: int
    slots: int
    decode_buckets: tuple[int, ...] = ()


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of the device, and what is free of them now."""

    total: int
    free: int


@dataclass(frozen=True)
class DeviceInfo:
    """What a device declares.

    ``writes``: "into" (providers write state in place) or "replace" (they set ``frame.states[name]`` to a new object).
    ``roles``: storage tags of the roles act and residual. ``kv_layouts`` in order of preference. ``dtypes``: the storage tags
    that it holds; a cache or a role that would need another is refused. ``buckets`` (honoured from api 1.1 on): the sizes of
    T that steps are padded to, empty for exact sizes; the other counts follow from T or take one of a few sizes, so that
    what was compiled for a step fits the next (``Plan.buckets``). ``decode_buckets`` (api 1.1): sizes that only decode steps
    are padded to, in which every sequence has one token and nothing is copied or filled, T and S alike; other steps, and those
    of a program on several devices, stay as they are. ``max_in_flight``: submitted steps at a time.
    ``ranks`` (api 1.1): where the ranks of a group live, in "processes" of their own or in "threads" of one; each opens the
    device whose index is its rank. ``invariant_buckets``: those of the buckets in which no row
    depends on another, whatever the providers say; with --deterministic steps have no other size. ``alignment`` is shown, and
    decides nothing. ``own_memory`` (api 1.1): whether the memory is the device's alone, so that the KV cache may have most of
    what is free. ``step_tokens`` (api 1.1): the most tokens of a step where the user names no number. ``kv_dtype`` (api 1.1):
    what a cache of 16 bits a number is held in where the user names none, int16, f16 or bf16.
    """

    name: str
    backend: str
    alignment: int = 64
    largest_allocation: int | None = None
    buckets: tuple[int, ...] = ()
    kv_layouts: tuple[KVLayout, ...] = ()
    dtypes: frozenset[str] = frozenset(HOST_DTYPES) - {"int16"}  # which a device of api 1.0 does not know
    roles: Mapping[str, str] = field(default_factory=lambda: {"act": "f32", "residual": "f32"})
    writes: str = "into"
    max_in_flight: int = 1
    invariant_buckets: tuple[int, ...] | None = None
    details: Mapping[str, str] = field(default_factory=dict)
    ranks: str = "processes"
    decode_buckets: tuple[int, ...] = ()
    own_memory: bool = False
    step_tokens: int = 512
    kv_dtype: str = "f16"


@dataclass(frozen=True)
class StepInputs:
    """One step, as i32, u32 and f32 arrays by the names of ``engine.ops.STEP_INPUTS``. ``embedding_rows`` is there where
    hidden rows are wanted, however many: ``Dims`` does not count them."""

    dims: Dims
    arrays: Mapping[str, Array]


@dataclass(frozen=True)
class StepResult:
    """The head's outputs on the host: tokens i32 [R], status i32 [R] (0 good, 1 non-finite, 2 fully masked), logprob f32
    [R], top_ids i32 [R, K], top_logprobs f32 [R, K]; ``values`` holds program outputs asked for by name (tests).
    ``embeddings`` (api 1.1): f32 [embedding rows, hidden], or None where there are none or the session gives none."""

    tokens: Array
    status: Array
    logprob: Array
    top_ids: Array
    top_logprobs: Array
    values: Mapping[str, Array] = field(default_factory=dict)
    embeddings: Array | None = None


class Device(Protocol):
    """The eight methods. Values are opaque to the core; ``copy_out(copy_in(a))`` equals ``a``."""

    def alloc(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A zeroed value of this shape and storage tag."""
        ...

    def free(self, value: Any) -> None: ...
    def copy_in(self, array: Array) -> Any: ...
    def copy_out(self, value: Any) -> Array: ...
    def fence(self) -> None:
        """Returns when all work submitted so far is done."""
        ...

    def memory_info(self) -> MemoryInfo: ...
    def describe(self) -> DeviceInfo: ...
    def session(self, plan: Plan) -> Session:
        """``return StepSession(self, plan)`` unless the device runs steps in a way of its own."""
        ...


@dataclass(frozen=True)
class Plan:
    """A placed program, ready to run: the body's and the head's segments in order, the states, the limits.

    ``state_places``: state name -> place, "device" or "host"; the plan of several devices, which the core's own session
    runs, has their names for "device". ``round_trip`` forces every reference op's operands through the device, and
    ``round_trips`` (api 1.1) names the places of which that is true. ``keep``: names of values to return with each step
    (tests). ``buckets`` (api 1.1): the sizes of T that ``StepSession`` pads steps to; where there are any, or
    ``limits.decode_buckets``, block 0 of each cache and the last slot of the history are padding's. ``embedding`` (api 1.1):
    segments that run after the body where a step has ``embedding_rows``, as often as these take with at most
    ``limits.dims.R`` at a time: R is their number there. ``pages`` (api 1.1): cache groups whose states are reserved as
    ``virtual_memory()`` does it, and how many blocks get or lose their memory at a time; the page of block 0 always has it.
    """

    body: tuple[Segment, ...]
    head: tuple[Segment, ...]
    states: tuple[StateSpec, ...]
    state_places: Mapping[str, str]
    limits: Limits
    round_trip: bool = False
    keep: tuple[str, ...] = ()
    round_trips: frozenset[str] = frozenset()
    buckets: tuple[int, ...] = ()
    embedding: tuple[Segment, ...] = ()
    pages: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Probe:
    """Whether a backend can run here, why (not), and how much it is to be preferred (higher wins)."""

    available: bool
    reason: str
    score: int = 0


@dataclass(frozen=True)
class Manifest:
    """What an entry point of group ``engine.backends`` gives. ``probe`` imports nothing heavy and initializes no device."""

    name: str
    api: str
    probe: Callable[[], Probe]
    open: Callable[[int, Mapping[str, Any]], Device]
    """``open(index, options)``; options are the user's settings for backends, such as {"threads": 2}."""
    automatic: bool = True
    """(api 1.1) False: for measurements and tests, used where it is named and never chosen by "auto"."""
    single: bool = False
    """(api 1.1) True: there is one device, of which every further index opens another instance, for ranks and ``--place``."""


_LAZY = {
    "StepSession": "..program.execute",
    "OPS": "..ops",
    "available_memory": ".host",
    "host_virtual_memory": ".host",
    "host_zeros": ".host",
    "find_processors": ".processors",
    "codebook": "..formats.codebooks",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that probing a backend loads neither the executor nor the catalogue.
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
