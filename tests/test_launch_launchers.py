"""The example scripts under launch/: variables they set are read, and commands they call exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from mtx.cli import main
from mtx.cli.options import parse
from mtx.cli.train import TrainOptions
from mtx.launch.cluster import find_cluster
from mtx.launch.exits import Exit
from mtx.presets import NAMES, preset

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "launch"


@pytest.mark.parametrize("name", ["slurm.sbatch", "openmpi.sh", "environment.sh"])
def test_scripts_are_shell(name):
    done = subprocess.run(["bash", "-n", LAUNCH / name], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def fake(folder: Path, name: str, *lines: str) -> None:
    """Make a command of this name, first in the path."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("\n".join(["#!/bin/bash", *lines]) + "\n")
    path.chmod(0o755)


def run_script(folder: Path, name: str, *arguments: str) -> subprocess.CompletedProcess:
    path = f"{folder / 'bin'}:/usr/bin:/bin"
    return subprocess.run(
        ["bash", LAUNCH / name, *arguments], capture_output=True, text=True, timeout=300,
        env={"PATH": path, "OUT": str(folder / "out"), "SLURM_JOB_ID": "7", "RESTARTS": "0"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("status", "left"), [(0, 0), (Exit.MISTAKE, 2), (Exit.PREEMPTED, 75), (Exit.LOST, 79)]
)
@pytest.mark.parametrize(("name", "launcher"), [("slurm.sbatch", "srun"), ("openmpi.sh", "mpirun")])
def test_exit_statuses_are_acted_on(tmp_path, name, launcher, status, left):
    fake(tmp_path / "bin", launcher, 'echo "$@"', f"exit {int(status)}")
    fake(tmp_path / "bin", "sleep", "exec /bin/sleep 0.01")
    options = ["-n", "4", "--"] if launcher == "mpirun" else []
    done = run_script(tmp_path, name, *options, "gpt-1.7b", "--steps", "9")
    assert done.returncode == left, done.stderr
    assert f"mtx train gpt-1.7b --steps 9 --out {tmp_path / 'out'}" in done.stdout
    assert ("gives up" in done.stderr) == (left == 79)


def test_environment_script_says_who_it_is(tmp_path):
    fake(tmp_path / "bin", "mtx", "env | grep ^JAX_", 'echo "$@"')
    done = run_script(tmp_path, "environment.sh", "h0:99", "4", "3", "gpt-1.7b")
    *variables, command = sorted(done.stdout.splitlines())
    cluster = find_cluster(dict(line.split("=", 1) for line in variables))
    assert (cluster.coordinator, cluster.processes, cluster.process) == ("h0:99", 4, 3)
    assert command == "train gpt-1.7b"


def devices_of(arguments: list[str]) -> int:
    """The number of devices in the layout of `mtx train ARGUMENTS`. UserError if it is invalid."""
    start = TrainOptions(run=preset(arguments[0]))
    return parse(arguments[1:], start, prog="mtx train").run.layout.devices


@pytest.mark.parametrize(
    ("file", "before", "devices"),
    [
        ("README.md", "mtx launch -n 2 --devices-per-process 4 -- train", 2 * 4),
        ("README.md", "sbatch --nodes 64 launch/slurm.sbatch", 64 * 8),
        ("launch/README.md", "mtx launch -n 2 --devices-per-process 4 -- train", 2 * 4),
        ("launch/README.md", "sbatch --nodes 64 launch/slurm.sbatch", 64 * 8),
        ("launch/README.md", "launch/openmpi.sh -n 4 --map-by ppr:1:node --", 4 * 8),
        ("launch/README.md", "--nnodes 2 --nproc-per-node 8 ... -m mtx train", 2 * 8),
        ("launch/README.md", "launch/environment.sh host0:1234 2 0", 2 * 8),
        ("launch/openmpi.sh", "launch/openmpi.sh -n 4 --map-by ppr:1:node --", 4 * 8),
        ("launch/slurm.sbatch", "sbatch --nodes 64 launch/slurm.sbatch", 64 * 8),
        ("mtx/cli/launch.py", "mtx launch -n 4 --devices-per-process 2 -- train", 4 * 2),
    ],
)
def test_examples_have_a_layout_for_their_devices(file, before, devices):
    """With eight GPUs a node."""
    (rest,) = re.findall(rf"{re.escape(before)} ([^`#\n:]+)", (ROOT / file).read_text())
    assert devices_of(rest.split()) == devices


def test_jobset_is_one():
    """As jobset.x-k8s.io/v1alpha2 and batch/v1 require."""
    manifest = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["spec"].keys() == {"failurePolicy", "network", "replicatedJobs"}
    (rule,) = manifest["spec"]["failurePolicy"]["rules"]
    assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    (train,) = manifest["spec"]["replicatedJobs"]
    job = train["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"]
    (on_exit,) = job["podFailurePolicy"]["rules"]
    assert on_exit["onExitCodes"]["values"] == [Exit.MISTAKE]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # a pod failure policy requires it
    (container,) = pod["containers"]
    assert container["name"] == on_exit["onExitCodes"]["containerName"]
    assert container["command"][:2] == ["mtx", "train"] and container["command"][2] in NAMES
    nodes, gpus = job["parallelism"], container["resources"]["limits"]["nvidia.com/gpu"]
    assert devices_of(container["command"][2:]) == nodes * gpus
    variables = {v["name"]: v["value"] for v in container["env"]}
    cluster = find_cluster(variables | {"JOB_COMPLETION_INDEX": "1"})
    assert (cluster.process, cluster.processes) == (1, job["completions"])
    # <jobset>-<replicated job>-<job>-<pod>.<subdomain>, the last being the jobset's name
    name = manifest["metadata"]["name"]
    host, _, port = cluster.coordinator.partition(":")
    assert host == f"{name}-{train['name']}-0-0.{name}"
    assert int(port) == container["ports"][0]["containerPort"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("launch -n 2", "name what to run: mtx launch -n 2 --devices-per-process 4 -- train ..."),
        (
            "launch -- presets",
            "presets is neither a command of mtx that computes nor a program here",
        ),
        ("launch -n 0 -- train", "processes=0 must be at least 1"),
        ("launch -n two -- train", "--processes takes INT, not 'two'"),
        ("launch --cpus -- train", "unknown option --cpus: did you mean --cpu?"),
        ("train --cluster.processes 2", "go together; set all three, or none"),
        ("train --watch.hang-s 0", "watch.hang_s=0.0 must be at least 1"),
    ],
)
def test_mistakes_on_the_command_line(capsys, command, message):
    assert main(command.split()) == 2
    assert message in capsys.readouterr().err


def test_launch_runs_any_program(tmp_path, capfd):
    program = shutil.which("bash")
    assert main(["launch", "-n", "2", "--cpu", "--", program, "-c", "echo $JAX_PROCESS_ID"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert {"[0] 0", "[1] 1"} <= set(lines)
