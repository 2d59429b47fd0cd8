"""Text to batches, with numpy alone: the floor of the project that knows no device.

Reading order: `documents` (files to texts, and what is held out), `tokenizer` (text to ids),
`samples` (ids to batches, a pure function of seed and step), `text` (the three put together).
"""

from mtx.data.text import TextData, load_text
from mtx.data.tokenizer import Tokenizer, tokenizer_from_dict

__all__ = ["TextData", "Tokenizer", "load_text", "tokenizer_from_dict"]
