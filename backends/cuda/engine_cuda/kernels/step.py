"""What opens a step: history, positions and KV slots."""

import triton
import triton.language as tl

from .common import find_sequence


@triton.jit(do_not_specialize=["count"])
def fill_history(history, slots, positions, ids, count, width, BLOCK: tl.constexpr):
    """history[slot, position] = id."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = n < count
    slot = tl.load(slots + n, mask=kept, other=0).to(tl.int64)
    position = tl.load(positions + n, mask=kept, other=0)
    tl.store(history + slot * width + position, tl.load(ids + n, mask=kept, other=0), mask=kept)


@triton.jit(do_not_specialize=["sequences"])
def expand_tokens(token_ids, seq_slots, seq_starts, offsets, history, ids, positions, token_seq, sequences, width):
    """A token a program: its sequence, position and id, of which the history takes what is known and gives the rest."""
    token = tl.program_id(0)
    seq = find_sequence(offsets, sequences, token)
    position = tl.load(seq_starts + seq) + token - tl.load(offsets + seq)
    place = history + tl.load(seq_slots + seq).to(tl.int64) * width + position
    known = tl.load(token_ids + token)
    if known < 0:
        known = tl.load(place)
    else:
        tl.store(place, known)
    tl.store(ids + token, known)
    tl.store(positions + token, position)
    tl.store(token_seq + token, seq)


@triton.jit(do_not_specialize=["count", "width"])
def kv_slots(table, positions, token_seq, slots, count, width, block_size, BLOCK: tl.constexpr):
    """table[seq, position // block_size] * block_size + position % block_size."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = token < count
    position = tl.load(positions + token, mask=kept, other=0)
    seq = tl.load(token_seq + token, mask=kept, other=0).to(tl.int64)
    block = tl.load(table + seq * width + position // block_size, mask=kept, other=0)
    tl.store(slots + token, block * block_size + position % block_size, mask=kept)
