"""The ranges of numbers in configs and options. Limits are far above what anybody builds, yet low
enough that planning such a model, or refusing it for its memory, takes moments."""

from __future__ import annotations

from typing import Annotated, Literal

from mtx.fields import Between

MOST_VIRTUAL = 8192  # devices: JAX makes 4,096 in ten seconds, twice as many in four times that
MOST_TOKENS = 2**27

Layers = Annotated[int, Between(1, 2**14)]
Width = Annotated[int, Between(1, 2**20)]  # of the hidden state; also heads
Choices = Annotated[int, Between(1, 64)]  # experts of a token: a gather is traced for each
Ffn = Annotated[int, Between(1, 2**24)]
Tokens = Annotated[int, Between(1, MOST_TOKENS)]  # of a sequence
Vocab = Annotated[int, Between(1, 2**24)]
TrainedVocab = Annotated[int, Between(64, 2**20)]  # of a WordPiece tokenizer
TrainedBytes = Annotated[int, Between(257, 2**20)]  # at least 256 bytes and the end of a document
Devices = Annotated[int, Between(1, 2**20)]
VirtualDevices = Annotated[int, Between(0, MOST_VIRTUAL)]  # 0: the machine's own
Stages = Annotated[int, Between(1, 2**14)]
StageLayers = tuple[Annotated[int, Between(0, 2**14)], ...] | Literal["even", "balanced"]
Slices = Annotated[int, Between(1, 2**16)]  # of a sequence
Sequences = Annotated[int, Between(1, 2**24)]  # of a batch
Processes = Annotated[int, Between(1, 2**10)]  # on one machine
Step = Annotated[int, Between(1, 2**31 - 1)]  # steps are counted on the devices
Interval = Annotated[int, Between(0, 2**31 - 1)]  # of steps; 0: never, or none
Seed = Annotated[int, Between(0, 2**31 - 1)]
DataSeed = Annotated[int, Between(0, 2**32 - 1)]
Seconds = Annotated[float, Between(0, 10.0**7)]  # four months
Patience = Annotated[float, Between(1, 10.0**7)]  # in seconds
Fraction = Annotated[float, Between(0, 1)]
NotNegative = Annotated[float, Between(0, 2.0**127)]
