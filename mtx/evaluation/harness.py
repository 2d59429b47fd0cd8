"""A trained model as lm-evaluation-harness wants it, for the hundreds of tasks that it has.

    import lm_eval
    from mtx.evaluation.harness import HarnessModel
    model = HarnessModel.from_run("runs/mine")
    lm_eval.simple_evaluate(model=model, tasks=["lambada_openai", "piqa"])

Needs `pip install 'mtx[eval]'`. On a cluster every process runs the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mtx.config import Layout
from mtx.data import Tokenizer
from mtx.errors import UserError
from mtx.evaluation.generate import Generator
from mtx.evaluation.sampling import Sampling
from mtx.evaluation.score import Row, continuation_row, load_model, score_rows
from mtx.step.state import TrainState
from mtx.step.trainer import Trainer

try:
    # From mtx[eval], which need not be installed where pyright runs.
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import get_rolling_token_windows  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise UserError(
        f"lm-evaluation-harness cannot be imported ({error}); pip install 'mtx[eval]'"
    ) from error

_MOST_TOKENS = 256  # of an answer, if its task does not say
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class HarnessModel(TemplateLM):
    """A model on the layout of `trainer`; G rows at once, where G is its global batch."""

    def __init__(self, trainer: Trainer, state: TrainState, tokenizer: Tokenizer, *, seed: int = 0):
        super().__init__()
        self._trainer, self._state, self._text = trainer, state, tokenizer
        self._seed = seed  # for answers that a task wants sampled

    @classmethod
    def from_run(
        cls, directory: str | Path, *, layout: Layout | None = None, batch: int = 0
    ) -> HarnessModel:
        """The newest checkpoint of a training run, as `load_model` takes it."""
        return cls(*load_model(directory, layout=layout, batch=batch))

    # -- what the harness asks for ----------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        if self._text.eod is None:
            raise UserError(
                f"the tokenizer {self._text.name} has no end-of-document token, after which a "
                "text could begin; name one when the tokenizer is made"
            )
        return self._text.eod

    @property
    def max_length(self) -> int:
        return self._trainer.run.model.sequence

    @property
    def tokenizer_name(self) -> str:
        return f"mtx-{self._text.name}-{self._text.identity.sha256[:12]}"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unused: Any
    ) -> list[int]:
        """The tokens of `string` alone: none is added, whatever `add_special_tokens` says."""
        return self._text.encode(string).tolist()

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **unused: Any,
    ) -> list[tuple[float, bool]]:
        """(ln p of the continuation, whether it is greedy) for each (texts, context, continuation).

        A context that is too long loses its beginning. A continuation without tokens is certain.
        """
        asked = [place for place, (_, _, target) in enumerate(requests) if target]
        rows = [
            continuation_row(
                np.array(requests[place][1], np.int32), np.array(requests[place][2], np.int32),
                eod=self.eot_token_id, sequence=self.max_length, what=f"continuation {place + 1}",
            )
            for place in asked
        ]  # fmt: skip
        results = [(0.0, True)] * len(requests)
        for place, score in zip(asked, self._scores(rows), strict=True):
            results[place] = (score.log_likelihood, score.greedy)
            if requests[place][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[place][0], results[place])
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """ln p of each whole text after an end-of-document token, in the widest possible
        windows."""
        rows: list[Row] = []
        counts = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1,
            )  # fmt: skip
            some = [Row(np.array([*seen, new[-1]], np.int32), len(new)) for seen, new in windows]
            rows, counts = rows + some, [*counts, len(some)]
        scores = self._scores(rows)
        results = [sum(next(scores).log_likelihood for _ in range(count)) for count in counts]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """The continuation of each text, up to the first of its stops and without it."""
        groups: dict[tuple, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(_settings(request.args[1]), []).append(place)
        results = [""] * len(requests)
        for (stops, tokens, sampling), places in groups.items():
            completions = self._generator.complete(
                [requests[place].args[0] for place in places], tokens=tokens, sampling=sampling,
                stop=stops, seed=self._seed,
            )  # fmt: skip
            for place, completion in zip(places, completions, strict=True):
                results[place] = completion.text
                self.cache_hook.add_partial("generate_until", requests[place].args, results[place])
        return results

    @cached_property
    def _generator(self) -> Generator:
        batch = self._trainer.run.global_batch
        return Generator(self._trainer, self._state, self._text, batch=batch)

    def _scores(self, rows: list[Row]):
        return score_rows(self._trainer, self._state, rows)


def _settings(wanted: dict[str, Any]) -> tuple[tuple[str, ...], int, Sampling]:
    """(stops, most tokens, how a token is chosen) for a task. Raises UserError for settings that
    are not supported."""
    wanted = dict(wanted)
    stops = wanted.pop("until", None) or ()
    lengths = [value for name in _LENGTHS if (value := wanted.pop(name, None)) is not None]
    temperature = wanted.pop("temperature", None)
    sampled = wanted.pop("do_sample", temperature is not None and temperature > 0)
    top_k, top_p = wanted.pop("top_k", None), wanted.pop("top_p", None)
    if wanted:
        raise UserError(f"generation settings that are not made here: {wanted}; leave them out")
    if sampled:
        temperature = 1.0 if temperature is None else float(temperature)
        sampling = Sampling(
            temperature=temperature, top_k=max(top_k or 0, 0), top_p=1.0 if top_p is None else top_p
        )
    else:
        sampling = Sampling(temperature=0.0)
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    tokens = int(lengths[0]) if lengths else _MOST_TOKENS
    return tuple(stop for stop in stops if stop), tokens, sampling
