"""SOBert: a BERT that reads 2,048 tokens, trained on posts (Mukherjee and Hellendoorn 2023).

    python experiments/sobert.py                                    # costs, and a small one trained
    python experiments/sobert.py --posts Posts.xml --out runs/posts # on your own posts
    python experiments/sobert.py --posts Posts.xml --size base --target a100-80gb --out /shared/base

prints what the paper's two models cost by the planner, for its 27 billion tokens in batches of half
a million, beside what the paper paid ($187 and $800, arXiv 2306.03268, abstract; the version at
FORGE 2025 says $374 and $1,600). Then it goes all the way: from posts to documents, a WordPiece
tokenizer trained on them, a dataset of sentences, and training. POSTS are Posts.xml of a Stack
Exchange dump, whose HTML becomes text with the code kept, or files that `mtx data build` reads
(.jsonl, .txt, ...); without any, Python's help topics are used.

Expected time of the first command: two minutes on two CPU cores.
Expected result: the same price per hour for both models, 3.16 and 3.13 dollars; the held-out
loss, of masked tokens and of the order of texts together, falls from 8.5 to 6.3 nats.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from rich.console import Console
from table1 import columns

from mtx.cli import exit_status, parse
from mtx.cli import main as mtx
from mtx.data.documents import read_documents
from mtx.errors import UserError
from mtx.plan.flops import parameters
from mtx.plan.plan import Plan, make_plan
from mtx.presets import preset

TOKENS = 27e9
PAID = {"base": 187, "large": 800}  # dollars
GPUS = 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """Costs of SOBert by the planner, and a BERT of 2,048 tokens trained on posts."""

    posts: tuple[str, ...] = ()  # Posts.xml, or text files, JSON lines and folders
    size: Literal["miniature", "base", "large"] = "miniature"  # of the model that is trained
    out: str = "runs/sobert"  # documents, tokenizer, dataset and run
    steps: int = 60  # of the miniature; the others take as many as their tokens need
    target: str = "a100-80gb"  # the GPU whose hours are counted
    virtual_devices: int = 8  # of the miniature


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="sobert.py")
    print_costs(options.target)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    vocab = 1024 if options.size == "miniature" else preset("sobert-base").model.vocab
    texts = [write_posts(options.posts, out / "posts.jsonl")] if is_dump(options.posts) else []
    texts = texts or list(options.posts) or [write_posts((), out / "posts.jsonl")]
    tokenizer, corpus = str(out / "tokenizer.json"), str(out / "corpus")
    for command in (
        ["data", "tokenizer", *texts, "--kind", "wordpiece", "--vocab", f"{vocab}",
         "--out", tokenizer],
        ["data", "build", *texts, "--level", "sentence", "--tokenizer", tokenizer, "--out", corpus],
        ["train", *trained(options), "--data.path", f"{corpus}_text_sentence",
         "--data.tokenizer", tokenizer, "--out", str(out / "run")],
    ):  # fmt: skip
        if status := mtx(command):
            return status
    return 0


# -- costs -----------------------------------------------------------------------------------------


def plan_of(size: str, target: str) -> Plan:
    run = preset(f"sobert-{size}")
    return make_plan(run, target=target)


def gpu_hours(plan: Plan) -> float:
    """GPU hours for the paper's number of tokens."""
    run = plan.run
    steps = TOKENS / (run.global_batch * run.model.sequence)
    return steps * plan.time.step_s * run.layout.devices / 3600


def print_costs(target: str) -> None:
    table = columns(
        "", "parameters", "s a step", "MFU", "GPU hours", "paper paid", "$ an hour", left=1
    )
    for size, dollars in PAID.items():
        plan = plan_of(size, target)
        hours = gpu_hours(plan)
        table.add_row(
            f"SOBert {size}", f"{parameters(plan.run.model) / 1e6:,.0f} million",
            f"{plan.time.step_s:.2f}", f"{plan.mfu:.1%}", f"{hours:,.0f}", f"${dollars}",
            f"{dollars / hours:.2f}",
        )  # fmt: skip
    console = Console(width=100, highlight=False)
    console.print(
        f"{TOKENS / 1e9:.0f} billion tokens on {GPUS} x {target}: predicted; dollars: published"
    )
    console.print(table)
    console.print()


# -- posts -----------------------------------------------------------------------------------------


class _Text(HTMLParser):
    """The text of a post, with its code unchanged."""

    def __init__(self):
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def is_dump(posts: Sequence[str]) -> bool:
    return any(post.endswith(".xml") for post in posts)


def read_dump(path: str) -> Iterator[str]:
    """Title and body of each post of a Posts.xml; UserError if the file is not one."""
    try:
        for _, row in ElementTree.iterparse(path):
            if row.tag == "row":
                text = _Text()
                text.feed(row.get("Body", ""))
                title = row.get("Title")
                yield "\n".join(filter(None, (title, "".join(text.parts).strip())))
            row.clear()
    except (OSError, ElementTree.ParseError) as error:
        raise UserError(f"{path} is no Posts.xml of a Stack Exchange dump: {error}") from None


def write_posts(posts: Sequence[str], path: Path) -> str:
    """Write a line of JSON for each post, or for each of Python's help topics if there are none."""
    documents = (
        (text for post in posts for text in read_dump(post)) if posts else read_documents(()).texts
    )
    with path.open("w", encoding="utf-8") as file:
        for text in documents:
            file.write(json.dumps({"text": text}) + "\n")
    return str(path)


# -- training --------------------------------------------------------------------------------------


def trained(options: Options) -> list[str]:
    """The preset and options of `mtx train`."""
    if options.size != "miniature":
        return [f"sobert-{options.size}"]
    return [
        "miniature-bert", "--sequence", "2048", "--microbatch", "1", "--global-batch", "4",
        "--steps", str(options.steps), "--eval-every", str(max(1, options.steps // 2)),
        "--virtual-devices", str(options.virtual_devices), "--optimizer.warmup-steps", "10",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
