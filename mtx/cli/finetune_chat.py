"""`mtx finetune --task chat`."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mtx.cli.finetuning import FinetuneOptions, by_epochs, make_folder, out_of
from mtx.cli.options import Line
from mtx.cli.output import say, write_text
from mtx.cli.process import start_devices
from mtx.config import RunConfig, to_dict

if TYPE_CHECKING:
    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.data import Tokenizer
    from mtx.data.chat import ChatRows, Template

_LR_OF_ADAPTERS = 2e-4


def finetune_chat(line: Line[FinetuneOptions]) -> None:
    options, step = line.options, line.options.step
    start_devices(options.virtual_devices)
    import jax

    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.step.trainer import Trainer
    from mtx.train.chat import CHAT, check_chat, described, find_template, judge
    from mtx.train.finetune import run_steps, start_from

    checkpoints = Checkpoints(line.names[0])
    pretrained, tokenizer = checkpoints.run(step), checkpoints.tokenizer(step)
    check_chat(pretrained.model)
    template = find_template(checkpoints, tokenizer, name=options.template, step=step)
    train, valid, about = _rows(options, pretrained, tokenizer, template)
    run = _run(line, pretrained, len(train))
    trainer, out = Trainer(run), out_of(options.out)
    state = start_from(trainer, checkpoints, step)
    make_folder(options.out)
    first = jax.process_index() == 0
    if first:
        _copy_companions(checkpoints, Path(options.out))
        if not options.json:
            print(about, flush=True)
    extra = {CHAT: described(template)}

    def save(state, epochs: list[dict]) -> None:
        out.save(trainer, state, tokenizer=tokenizer, extra=extra | {"epochs": list(epochs)})

    def judged(state) -> dict:
        return {"valid_loss": judge(trainer, state, valid).loss}

    def batch_of(number: int):
        return train.training_batch(number, run.global_batch)

    steps = partial(run_steps, trainer, state, batch_of, epoch_steps=len(train) / run.global_batch)
    before = judge(trainer, state, valid)
    del state  # the first step donates it
    with out:
        epochs = by_epochs(steps, judged, save, steps=run.steps, silent=options.json)
    if first:
        results = {
            "task": "chat", **epochs[-1], "before": asdict(before), "epochs": epochs,
            "run": to_dict(run),
        }  # fmt: skip
        write_text(Path(options.out, "finetune.json"), json.dumps(results, indent=1) + "\n")
        loss, tokens = epochs[-1]["valid_loss"], before.tokens
        said = f"finished   loss {before.loss:.4f} -> {loss:.4f}, of {tokens:,} tokens held out"
        say(results, [f"{said}: {out.directory}"], as_json=options.json)


def _rows(
    options: FinetuneOptions, pretrained: RunConfig, tokenizer: Tokenizer, template: Template
) -> tuple[ChatRows, ChatRows, str]:
    """(rows to train on, rows to judge by, a line that describes them)"""
    from mtx.train.chat import hold_out, make_rows, read_conversations

    train = read_conversations(options.train)
    if options.valid:
        valid = read_conversations(options.valid)
    else:
        train, valid = hold_out(train, options.held_out, options.seed)
    made = [
        make_rows(some, tokenizer, template, pretrained.model, seed=options.seed, long=options.long)
        for some in (train, valid)
    ]
    (rows, skipped), (held, skipped_held) = made
    left_out = skipped + skipped_held
    about = (
        f"chat       {len(rows.conversations):,} conversations in {len(rows):,} rows, "
        f"{rows.learned:,} tokens of the assistant; {len(held.conversations):,} conversations held "
        f"out" + (f"; {left_out:,} too long and left out" if left_out else "")
    )
    return rows, held, about


def _run(line: Line[FinetuneOptions], pretrained: RunConfig, rows: int) -> RunConfig:
    import jax

    from mtx.plan.fit import fit_layout
    from mtx.train.chat import chat_run
    from mtx.train.finetune import Finetuning

    options = line.options
    model = replace(pretrained.model, **line.changes("model"))
    layout = fit_layout(pretrained.layout, jax.device_count(), line.changes("layout"))
    given = line.changes("optimizer")
    if model.lora_rank:
        given = {"lr": _LR_OF_ADAPTERS} | given
    how = Finetuning(
        epochs=options.epochs, batch=options.batch, warmup_fraction=options.warmup_fraction,
        seed=options.seed, dropout=model.dropout, **given,
    )  # fmt: skip
    return replace(chat_run(pretrained, model, layout, how, rows=rows), out=options.out)


def _copy_companions(checkpoints: Checkpoints, out: Path) -> None:
    """Copy the files that came with a converted model, so that its export has them too."""
    from mtx.conversion.convert import COMPANIONS

    source = checkpoints.directory.parent / COMPANIONS
    if source.is_dir():
        shutil.copytree(source, out / COMPANIONS, dirs_exist_ok=True)
