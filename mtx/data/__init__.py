"""Text and datasets to batches, using numpy alone: the layer of the project that knows no devices.

Reading order: `batches` (samples to batches, a pure function of the number consumed before, read
ahead), `documents` (text files in memory), `indexed`, `indices` and `gpt` (Megatron-LM's datasets
and their samples), `pairs`, `masked` and `bert` (what a BERT trains on), `spans` (and a T5), `chat`
(conversations), `image_records`, `pixels`, `shapes` and `images` (what a LLaVA trains on), `corpus`
(any of these except `chat`, from one config); and for tokenizers, `tokenizer_base`, `tokenizer`,
`subwords`, `sentencepiece` and `tokenizer_files`.
"""

from mtx.data.batches import Corpus, read_ahead
from mtx.data.corpus import load_data, load_text
from mtx.data.tokenizer import Tokenizer, tokenizer_from_dict

__all__ = [
    "Corpus", "Tokenizer", "load_data", "load_text", "read_ahead",
    "tokenizer_from_dict",
]  # fmt: skip
