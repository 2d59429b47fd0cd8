"""Fine-tuning on conversations: how they are read, the template that renders them, and the run.
For any model that predicts the next token; trains all of it, or adapters (`lora_rank`).

G rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.conversion.convert import COMPANIONS
from mtx.data import Tokenizer
from mtx.data.chat import (
    ROLES,
    ChatML,
    ChatRows,
    Jinja,
    Message,
    Template,
    Tokens,
    encode_chat,
)
from mtx.data.samples import shuffled
from mtx.errors import UserError, shown
from mtx.evaluation.files import read_records, text_field
from mtx.files import read_json, read_text
from mtx.step.state import TrainState
from mtx.step.trainer import Trainer
from mtx.train.finetune import Finetuning

CHAT = "chat"  # key in a checkpoint's extra: the template that the model has learned
TemplateName = Literal["auto", "chatml"]
Long = Literal["refuse", "skip"]
_HELD_OUT = 9  # in the key of random numbers: what they are for


class Conversation(NamedTuple):
    messages: tuple[Message, ...]
    where: str  # for messages to people


def read_conversations(names: Sequence[str]) -> list[Conversation]:
    """Reads JSON lines {"messages": [{"role": ..., "content": ...}, ...]}. UserError, with the
    line, for anything else, and for a conversation in which the assistant says nothing."""
    found = []
    for where, record in read_records(names):
        messages = record.get("messages")
        if not isinstance(messages, list) or not messages:
            raise UserError(
                f'{where}: messages={shown(messages)} must be a list of {{"role": ..., "content": '
                "...}"
            )
        read = tuple(_message(each, f"{where}, message {n}") for n, each in enumerate(messages, 1))
        if not any(each.role == "assistant" and each.content for each in read):
            raise UserError(
                f"{where}: the assistant says nothing, and there is nothing to learn; take it out"
            )
        found.append(Conversation(read, where))
    return found


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise UserError(f'{where}: {shown(value)} must be {{"role": ..., "content": ...}}')
    role, content = (text_field(value, name, where) for name in Message._fields)
    if role not in ROLES:
        raise UserError(f"{where}: role={shown(role)} must be one of {', '.join(ROLES)}")
    return Message(role, content)


# -- templates -------------------------------------------------------------------------------------


def find_template(
    checkpoints: Checkpoints, tokenizer: Tokenizer, *, name: TemplateName = "auto",
    step: int | None = None,
) -> Template:  # fmt: skip
    """The template that the model has learned in a fine-tuning, or else its own, from the files
    that came with it; ChatML if there is neither, or if `name` asks for it."""
    if name == "chatml":
        return ChatML()
    learned = checkpoints.extra(step).get(CHAT)
    if learned is not None:
        return template_from(learned)
    folder = checkpoints.directory.parent / COMPANIONS
    config = folder / "tokenizer_config.json"
    said = read_json(config) if config.is_file() else {}
    said = said if isinstance(said, dict) else {}
    source = _source(folder, said)
    if source is None:
        return ChatML()
    tokens = [(key, _spelling(value)) for key, value in said.items() if key.endswith("_token")]
    marks = tuple(tokenizer.special_tokens())
    return Jinja(source, tuple((key, text) for key, text in tokens if text), marks)


def _source(folder: Path, config: dict) -> str | None:
    """The source of a model's own template, from a separate file or from its tokenizer's config."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        return read_text(alone)
    said = config.get("chat_template")
    if isinstance(said, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in said if isinstance(each, dict)}
        said = named.get("default")
    return said if isinstance(said, str) else None


def _spelling(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def described(template: Template) -> dict:
    """A template as JSON."""
    if isinstance(template, Jinja):
        return {"jinja": template.source, "tokens": template.tokens, "marks": template.marks}
    return {"name": "chatml"}


def template_from(values: dict) -> Template:
    """The inverse of `described`."""
    if "jinja" not in values:
        return ChatML()
    tokens = tuple((name, text) for name, text in values["tokens"])
    return Jinja(values["jinja"], tokens, tuple(values["marks"]))


# -- what is trained on ----------------------------------------------------------------------------


def make_rows(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, template: Template,
    model: ModelConfig, *, seed: int, long: Long = "refuse",
) -> tuple[ChatRows, int]:  # fmt: skip
    """(rows, how many conversations were left out as too long). UserError, with the line, for a
    conversation that cannot be rendered, has a token beyond the model's vocabulary, or is too long
    if `long` is "refuse"."""
    kept: list[Tokens] = []
    for conversation in conversations:
        try:
            tokens = encode_chat(tokenizer, template, conversation.messages)
        except UserError as error:
            raise UserError(f"{conversation.where}: {error}") from None
        if tokens.ids.max() >= model.vocab:
            raise UserError(
                f"{conversation.where} has the token {tokens.ids.max()}, and the model's "
                f"vocabulary is {model.vocab}; use the tokenizer that it was trained with"
            )
        if len(tokens.ids) - 1 <= model.sequence:
            kept.append(tokens)
        elif long == "refuse":
            raise UserError(
                f"{conversation.where} has {len(tokens.ids):,} tokens, and sequence="
                f"{model.sequence} takes {model.sequence + 1:,}; cut it, or use --long skip"
            )
    left_out = len(conversations) - len(kept)
    if not kept:
        raise UserError(
            f"none of {left_out:,} conversations has at most {model.sequence + 1:,} tokens; use "
            "shorter ones, or a model with a longer sequence"
        )
    return ChatRows(conversations=kept, sequence=model.sequence, seed=seed), left_out


def hold_out(
    conversations: Sequence[Conversation], fraction: float, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """(those to train on, those to judge the model by), at least one each."""
    if not 0 < fraction < 1:
        raise UserError(f"held_out={fraction} must lie in (0, 1); or name files with --valid")
    count = max(1, round(fraction * len(conversations)))
    if count >= len(conversations):
        raise UserError(
            f"held_out={fraction} of {len(conversations)} conversations leaves none to train on; "
            "give more, or name files with --valid"
        )
    order = shuffled(len(conversations), seed, _HELD_OUT)
    held = set(order[:count].tolist())
    return (
        [each for n, each in enumerate(conversations) if n not in held],
        [each for n, each in enumerate(conversations) if n in held],
    )


def check_chat(model: ModelConfig) -> None:
    """Raises UserError for a model that cannot continue a conversation."""
    if model.reads_images:
        raise UserError(
            f"family={model.family!r} learns conversations about images by mtx train RUN_DIR "
            "--data.path FILE; use that"
        )
    if model.objective != "next token":
        raise UserError(
            f"family={model.family!r} predicts no next token of a text alone; use another family"
        )


def chat_run(
    pretrained: RunConfig, model: ModelConfig, layout: Layout, how: Finetuning, *, rows: int
) -> RunConfig:
    """The run that fine-tunes on `rows` rows, `how.batch` of them a step. `how.dropout` is not
    used, because the model has its own. UserError if the model has other adapters already."""
    before = pretrained.model
    if before.lora_rank and model != before:
        raise UserError(
            f"the model has adapters, lora_rank={before.lora_rank}, lora_alpha={before.lora_alpha} "
            f"and lora_on={' '.join(before.lora_on)}; go on with these, or merge them first: "
            "mtx convert"
        )
    steps = how.steps(rows)
    return replace(
        pretrained, model=model, layout=layout, optimizer=how.optimizer(steps), seed=how.seed,
        steps=steps, global_batch=how.batch,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Heard:
    """How well a model predicts what the assistant says."""

    conversations: int
    tokens: int  # the assistant's
    loss: float  # mean over these, nats


def judge(trainer: Trainer, state: TrainState, rows: ChatRows) -> Heard:
    """The loss on held-out rows, without dropout."""
    total = weight = 0.0
    count = trainer.run.global_batch
    for first in range(0, len(rows), count):
        batch = rows.batch(range(first, min(first + count, len(rows))), count)
        loss, tokens = trainer.evaluate(state, trainer.place(batch))
        total, weight = total + float(loss), weight + float(tokens)
    return Heard(conversations=len(rows.conversations), tokens=rows.learned, loss=total / weight)
