"""Eight virtual CPU devices for every test, set before JAX starts."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from mtx.launch.start import use_virtual_devices

# Many tests start Python anew: what it has compiled it keeps, also where it is told not to, or else
# importing mtx would take twice as long each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# JAX and XLA ask for many small blocks: with TBB's malloc in place of glibc's tests take 5 to 20 %
# less time. Processes that are started from here have it, pytest-xdist's among them.
libraries = [Path(sys.prefix, "lib", f"libtbbmalloc{kind}.so.2") for kind in ("", "_proxy")]
if all(library.exists() for library in libraries) and not {*" :"} & {*sys.prefix}:
    os.environ.setdefault("LD_PRELOAD", ":".join(map(str, libraries)))

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")
# Whatever the terminal: plain text, as wide as where there is none.
os.environ["COLUMNS"] = "80"
for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)
# What a test reads in a compiled program must have been compiled; and nothing is left in a home.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
# Costs are traced once for all of pytest's processes: a file is there whole or not at all.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="mtx-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# The tests compile hundreds of programs and run each once: LLVM's optimisations, jax 0.10's new
# fusion emitters and code cut up for several threads cost more than they give. They come after
# everything that the tests read in a compiled program.
os.environ["XLA_FLAGS"] = " ".join([
    os.environ.get("XLA_FLAGS", ""),
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
])  # fmt: skip
# Nor do the tests read which line of a file made an op: a tenth of what compiling takes.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
use_virtual_devices(8)
# Traced programs are many objects that stay: looking through them for garbage as often as Python
# would, each 700 new ones and again among the older, is a tenth of the tests' time.
gc.set_threshold(1_000_000, 50, 100)

# A busy machine is no failure.
settings.register_profile("mtx", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mtx")


def _with_a_large_frame():
    """A function that calls another from a frame of 70,000 variables: what is called then lies in
    one piece of Python's stack. Python 3.11 maps a piece whenever a call crosses its end and
    unmaps it on return: what JAX traces, hundreds of calls deep, does so all the time, a twentieth
    of the tests' time."""
    variables = " = ".join(f"v{n}" for n in range(70_000))
    lines = "def call(test, **given):", "return test(**given)", f"{variables} = None"
    space = {}
    exec("\n    ".join(lines), space)
    return space["call"]


_call = _with_a_large_frame()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    test = pyfuncitem.obj
    pyfuncitem.obj = partial(_call, test)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


def pytest_collection_modifyitems(items):
    """The longest begins first: else one process of two waits for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_types.py")


@pytest.fixture(scope="module")
def kept_programs(tmp_path_factory):
    """What is compiled is kept for the module's other runs, as `mtx train` does."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    changes = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in changes}
    for values in (changes, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is changes:
            yield


@pytest.fixture
def optimised(monkeypatch):
    """LLVM optimises the training steps: these run often enough to be worth it."""
    options = {"xla_backend_optimization_level": 2}
    monkeypatch.setattr("mtx.step.xla.options", lambda *_, **__: options)


@pytest.fixture
def few_presets(monkeypatch):
    """Among which the largest that fits is found soon: each costs the traces of its layers."""
    monkeypatch.setattr("mtx.plan.fit.NAMES", ("miniature", "gpt-1.7b", "gpt-18b"))


@pytest.fixture
def usual_interrupt():
    """Ctrl-C raises, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def full_disk(monkeypatch):
    """full_disk(2): the second save of this test finds no room."""
    from mtx.checkpoint import commit

    def on_save(failing):
        write_parts, writes = commit.write_parts, []

        def full_once(path, parts):
            writes.append(path)
            if len(writes) == failing:
                raise OSError(28, "No space left on device")
            return write_parts(path, parts)

        monkeypatch.setattr(commit, "write_parts", full_once)

    return on_save
