"""A tokenizer as BERT's files have it."""

from __future__ import annotations

import string

import tokenizers
from checkpoints import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

LETTERS = string.ascii_letters + string.digits
WORDS = ["once", "upon", "little", "GI", "gi", "##ve", "##rl", "naive", "é"]
PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *LETTERS,
    *string.punctuation,
    *(f"##{letter}" for letter in LETTERS),
    *WORDS,
]


def write_wordpiece(folder, lowercase):
    """As BERT's files have it."""
    ids = {text: token for token, text in enumerate(PIECES)}
    pipeline = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    pipeline.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pipeline.decoder = decoders.WordPiece()
    pipeline.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    marks = {f"{mark.strip('[]').lower()}_token": mark for mark in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=pipeline, **marks).save_pretrained(folder)
