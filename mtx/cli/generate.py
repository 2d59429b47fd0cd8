"""`mtx generate`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import add
from typing import TYPE_CHECKING

from mtx.cli.opened import AnyLayout, ComputedIn, changed
from mtx.cli.options import File, Flag, Line, command
from mtx.cli.output import check_writable, progress, write_text
from mtx.cli.process import start_devices
from mtx.config import Layout
from mtx.errors import UserError
from mtx.families.llava import Llava
from mtx.files import read_text
from mtx.paths import user_path
from mtx.sizes import Interval, Seed, Sequences, Tokens, VirtualDevices

if TYPE_CHECKING:
    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.data import Tokenizer
    from mtx.data.images import ImagePrompt
    from mtx.evaluation.generate import Progress, Prompt


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    prompt: tuple[str, ...] = ()  # one text or several; without one, a new document is begun
    prompt_file: File = None  # one prompt per line; .jsonl: JSON objects with a "prompt"
    tokens: Tokens = 200  # the most tokens to generate after each prompt
    temperature: float = 0.8  # 0: always the most likely token
    top_k: Interval = 0  # sample from this many of the most likely tokens; 0: from all
    top_p: float = 1.0  # sample from the fewest, most likely tokens that reach this probability
    # for a model that reads images: one image for all prompts, or one for each
    image: tuple[str, ...] = ()
    chat: Flag = False  # treat each prompt as a user's message, and generate the assistant's answer
    stop: tuple[str, ...] = ()  # end a text before any of these strings
    stop_token: tuple[int, ...] = ()  # end a text before any of these tokens
    seed: Seed = 0  # seed for sampling
    batch: Sequences = 64  # prompts at a time
    json: Flag = False  # print the texts as JSON lines
    out: File = None  # write the texts to this file, as JSON lines, instead of printing them
    step: Interval | None = None  # the checkpoint's step; by default the newest
    virtual_devices: VirtualDevices = 0  # CPU devices to create, for a machine without GPUs
    model: object = field(default_factory=ComputedIn)
    layout: Layout = field(default_factory=AnyLayout)


@command("mtx generate RUN_DIR", GenerateOptions)
def generate_command(line: Line[GenerateOptions]) -> None:
    """Let a trained model continue a text.

    RUN_DIR is the --out of a training run. Its newest checkpoint is loaded onto the layout that
    --layout... gives, whatever the run's was; layout fields not given are the run's own, reduced if
    there are fewer devices. With --chat the model answers by the template it learned in mtx
    finetune --task chat, or by the one that came with it. On a terminal, the speed is printed at
    the end.
    """
    options, step = line.options, line.options.step
    from mtx.evaluation.sampling import Sampling

    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    prompts = _prompts(options)
    check_writable(options.out)
    start_devices(options.virtual_devices)
    import jax

    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.evaluation.generate import Generator, check_asked
    from mtx.step.trainer import Trainer

    checkpoints = Checkpoints(line.names[0])
    run, layout = changed(checkpoints.run(step), line, jax.device_count())
    if options.image and not run.model.reads_images:
        raise UserError(f"family={run.model.family!r} sees no images; leave --image out")
    check_asked(run.model, tokens=options.tokens, seed=options.seed, batch=options.batch)
    trainer = Trainer(replace(run, layout=layout, global_batch=layout.data * layout.microbatch))
    state, tokenizer = checkpoints.restore(trainer, step), checkpoints.tokenizer(step)
    generator = Generator(trainer, state, tokenizer, batch=options.batch)
    del state  # the generator has what it needs
    stop: tuple[str | int, ...] = *options.stop, *options.stop_token
    given: Sequence[Prompt] = prompts
    if isinstance(run.model, Llava):
        given = _seen(prompts, options, run.model, tokenizer)
    elif options.chat:
        given, ends = _asked(prompts, checkpoints, tokenizer, step)
        stop += ends
    with _progress(silent=jax.process_index() != 0) as report:
        completions = generator.complete(
            given, tokens=options.tokens, sampling=sampling, seed=options.seed, report=report,
            stop=stop,
        )  # fmt: skip
    if jax.process_index() == 0:
        lines = "".join(json.dumps(asdict(each)) + "\n" for each in completions)
        if options.out is not None:
            write_text(options.out, lines)
        if options.json:
            print(lines, end="")
        elif options.out is None:
            shown = ("" if options.chat else each.prompt for each in completions)
            print("\n\n".join(map(add, shown, (each.text for each in completions))))


def _asked(
    prompts: Sequence[str], checkpoints: Checkpoints, tokenizer: Tokenizer, step: int | None
) -> tuple[list[list[int]], tuple[str | int, ...]]:
    """(the tokens of each prompt as a user's message, what ends an answer)"""
    from mtx.data.chat import Message, encode_prompt
    from mtx.train.chat import find_template

    template = find_template(checkpoints, tokenizer, step=step)
    asked = [encode_prompt(tokenizer, template, [Message("user", each)]) for each in prompts]
    return [ids for ids, _ in asked], asked[0][1]


def _seen(
    prompts: Sequence[str], options: GenerateOptions, model: Llava, tokenizer: Tokenizer
) -> list[ImagePrompt]:
    """The prompts with their images."""
    from mtx.data.images import image_prompt

    pictures = [user_path(name, "image") for name in options.image]
    if len(pictures) > 1 and len(prompts) == 1:
        prompts = list(prompts) * len(pictures)
    if len(pictures) == 1:
        pictures *= len(prompts)
    if pictures and len(pictures) != len(prompts):
        raise UserError(
            f"{len(pictures)} images for {len(prompts)} prompts; give one of either, or as many"
        )
    seen = [[each] for each in pictures] or [[]] * len(prompts)
    return [
        image_prompt(prompt, pair, tokenizer, model, chat=options.chat)
        for prompt, pair in zip(prompts, seen)
    ]


def _prompts(options: GenerateOptions) -> Sequence[str]:
    if options.prompt_file is None:
        return options.prompt or ("",)
    if options.prompt:
        raise UserError("--prompt and --prompt-file both say what to begin with; give one of them")
    path = user_path(options.prompt_file)
    if path.suffix in (".jsonl", ".ndjson"):
        from mtx.evaluation.files import read_records, text_field

        return [text_field(record, "prompt", where) for where, record in read_records([str(path)])]
    lines = read_text(path, "prompt_file").splitlines()
    if not lines:
        raise UserError(f"prompt_file={path} is empty; write one prompt on each of its lines")
    return lines


@contextlib.contextmanager
def _progress(*, silent: bool) -> Iterator[Callable[[Progress], None] | None]:
    """A bar of tokens on stderr if that is a terminal, and at the end a line with the rate."""
    if silent or not sys.stderr.isatty():
        yield None
        return
    start_s, marks = time.perf_counter(), []
    with progress(said="compiling") as bar:

        def report(now: Progress) -> None:
            marks.append((time.perf_counter() - start_s, now.drawn))
            bar(now.done, now.most, f"{now.drawn:,} tokens")

        yield report
    print(_rate(marks), file=sys.stderr)


def _rate(marks: Sequence[tuple[float, int]]) -> str:
    """The speed in words, from each report's (seconds, tokens); the first tokens, which wait for
    the compiler, are counted separately."""
    said = f"first tokens after {marks[0][0]:.1f} s"
    if len(marks) < 3:
        return said
    (begin_s, begin), (end_s, end) = marks[1], marks[-1]
    return f"{said}, then {(end - begin) / (end_s - begin_s):,.1f} tokens/s"
