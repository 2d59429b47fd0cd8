"""`mtx completion`: real shells complete typed text."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mtx.cli import with_actions
from mtx.cli.completion import completion_script, rows

ROOT = Path(__file__).parent.parent
SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
BEGIN = {
    "bash": "source ./script\nbind 'set bell-style none'\nPS1=\n",
    "zsh": "autoload -U compinit && compinit -u -d dump\nsource ./script\nunsetopt beep\nPS1=\n",
}
# Typed text, with a tab for each word that the shell has to complete: the arguments mtx then gets.
TYPED = {
    "mtx sched\t": "schedule",
    "mtx chec\tverif\tbo\t": "checkpoint verify book.txt",
    "mtx train bench\t--layout.rec\tsel\t": "train bench-s --layout.recompute selective",
    "mtx train --layout.recompute=f\t": "train --layout.recompute=full",
    "mtx train --data.path book.txt no\t--model.ti\t": "train --data.path book.txt notes.md "
    "--model.tied",
    "mtx train --layout.no-s\t": "train --layout.no-sequence-parallel",
    "mtx plan --target h2\t--js\t": "plan --target h200 --json",
    "mtx plan gpt-2\t--draw 'a pi\t": "plan gpt-2-345m --draw a picture.svg",
    "mtx data build bo\t--lev\ts\t": "data build book.txt --level sentence",
    "mtx schedule dual\t--mod\ta\t": "schedule dualpipe_v --model asynchronous",
    "mtx help data spl\t": "help data split",
    "mtx launch -n 2 -- tr\tbench\t--global\t16": "launch -n 2 -- train bench-s --global-batch 16",
    "mtx plan --model.hid\t768 --model.laye\t2": "plan --model.hidden 768 --model.layers 2",
    "mtx plan --tens\t8 --virt\t2": "plan --tensor 8 --virtual 2",
    "mtx schedule --layout.pi\t8 --microbatches 4": "schedule --layout.pipe 8 --microbatches 4",
    "mtx qqq ch\t": "qqq ch",
}


@pytest.fixture(scope="module")
def scripts():
    """The command's output for each shell, from one table."""
    commands = with_actions()
    table = list(rows(commands))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtx.cli.completion.rows", lambda commands: table)
        return {shell: completion_script(shell, commands) for shell in SHELLS}


@pytest.fixture(params=SHELLS)
def shell(request, tmp_path, monkeypatch, scripts):
    if shutil.which(request.param) is None:
        pytest.skip(f"no {request.param} here")
    (tmp_path / "script").write_text(scripts[request.param])
    for name in ("book.txt", "notes.md", "a picture.svg"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return request.param


def test_a_shell_completes_what_is_typed(shell):
    """In a terminal, where mtx is a function that writes down its arguments."""
    typed = [BEGIN[shell], 'mtx() { echo "<$*>" >> ran; }\n', *(f"{line}\n" for line in TYPED)]
    ours, theirs = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "HOME": os.getcwd(), "TERM": "dumb", "LC_ALL": "C"}
    process = subprocess.Popen(
        SHELLS[shell], stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    giving_up = threading.Timer(300, process.kill)  # on a shell that asks a question
    giving_up.start()
    os.write(ours, "".join([*typed, "exit\n"]).encode())
    shown = b""
    try:
        while block := os.read(ours, 1 << 16):
            shown += block
    except OSError:  # the shell has gone, and its terminal with it
        pass
    process.wait(timeout=300)
    giving_up.cancel()
    os.close(ours)
    ran = Path("ran").read_text().splitlines()
    assert ran == [f"<{line}>" for line in TYPED.values()], shown.decode(errors="replace")


OFFERED = {
    "mtx data ": "build inspect merge split index neighbours tokenizer",
    "mtx help checkpoint ": "list inspect verify export",
    "mtx plan --layout.recompute ": "around_attention full none selective",
    # As bash splits --recompute=.
    "mtx train --layout.recompute = ": "around_attention full none selective",
    "mtx plan --target tpu": "tpu-v5p tpu-v5e tpu-v6e",
    "mtx train --model.layers ": "",
    "mtx plan --model.family ll": "llama llava",
    "mtx train --layout.stage_layers 1 b": "balanced",
    "mtx completion ": "bash zsh",
    "mtx nonsense ": "",
}


def test_bash_offers_what_may_follow(tmp_path, scripts):
    (tmp_path / "script").write_text(scripts["bash"])
    asked = "".join(
        f"COMP_WORDS=({line}{'' if line[-1].strip() else ' ' + repr('')}) COMPREPLY=()\n"
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _mtx; echo ${COMPREPLY[*]}\n"
        for line in OFFERED
    )
    done = subprocess.run(
        ["bash", "-c", f"source ./script\n{asked}"], cwd=tmp_path, capture_output=True, text=True
    )
    assert dict(zip(OFFERED, done.stdout.splitlines(), strict=True)) == OFFERED, done.stderr


def test_a_script_knows_every_command_and_option_without_jax():
    code = """if True:
        import sys
        from mtx.cli import main
        main(["completion", "bash"])
        print("jax" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "False", done.stderr
    for command in with_actions():
        assert f"|{command}|" in done.stdout
    for option in ("train|--optimizer.lr|", "checkpoint export|--dtype|", "evaluate|--task|"):
        assert f"\n{option}" in done.stdout
