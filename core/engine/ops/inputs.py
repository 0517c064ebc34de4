"""The arrays that a step brings to the device, by name. All else (positions, KV slots, lengths) is derived there."""

from __future__ import annotations

from collections.abc import Mapping

FROM_HISTORY = -1

# name -> (shape, storage tag); a name ending in ".*" comes once a cache group.
STEP_INPUTS: Mapping[str, tuple[tuple[int | str, ...], str]] = {
    "token_ids": (("T",), "i32"),  # FROM_HISTORY: take history[slot, position]
    "seq_slots": (("S",), "i32"),
    "seq_starts": (("S",), "i32"),  # tokens computed before this step
    "query_offsets": (("S+1",), "i32"),
    "page_table.*": (("S", "P"), "i32"),  # 0 is the null block
    "block_copies.*": (("C", 2), "i32"),  # (source, destination), before anything else of the step
    "history_copies": (("H", 2), "i32"),  # (source, destination) slots
    "fill_slots": (("F",), "i32"),  # history[fill_slot, fill_position] = fill_id, after the copies
    "fill_positions": (("F",), "i32"),
    "fill_ids": (("F",), "i32"),
    "rows": (("R",), "i32"),  # token index of each row that reaches the head
    "embedding_rows": (
        ("R",),
        "i32",
    ),  # the same of hidden rows for the host, R of them at a time; only where there are any
    "prompt_lengths": (("R",), "i32"),
    "temperature": (("R",), "f32"),  # 0: greedy
    "top_k": (("R",), "i32"),  # 0: off
    "top_p": (("R",), "f32"),  # 1: off
    "min_p": (("R",), "f32"),  # 0: off
    "typical_p": (("R",), "f32"),  # 1: off
    "repetition_penalty": (("R",), "f32"),  # 1: off
    "frequency_penalty": (("R",), "f32"),
    "presence_penalty": (("R",), "f32"),
    "no_repeat_ngram_size": (("R",), "i32"),  # 0: off
    "bias_offsets": (("R+1",), "i32"),
    "bias_ids": (("B",), "i32"),
    "bias_values": (("B",), "f32"),
    "mask_rows": (("R",), "i32"),  # -1: none
    "masks": (("M", "V/32"), "u32"),  # bit set: allowed
    "seeds": (("R", 2), "u32"),
    "branches": (("R",), "u32"),
    "want_logprobs": (("R",), "i32"),  # -1: none; k: the chosen token's and the k best
    "candidates": (("R",), "i32"),  # 0: none; k: a beam, whose logits become logprobs first, and whose k best are given
    "targets": (("R",), "i32"),  # -1: sample; a token: that one, for its logprob
}
