"""Every family of models by its name in `ModelConfig.family`."""

from __future__ import annotations

from mtx.config import Family
from mtx.models.bert import Bert
from mtx.models.gpt import GPT
from mtx.models.llama import Llama
from mtx.models.model import Model

FAMILIES: dict[Family, type[Model]] = {"gpt": GPT, "llama": Llama, "bert": Bert}
