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

# Many tests start new Python processes. Have Python keep its bytecode even if it is told not to;
# otherwise each import of mtx would take twice as long.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# JAX and XLA allocate many small blocks: with TBB's malloc instead of glibc's, tests take 5 to 20 %
# less time. Processes started from here use it, including pytest-xdist's.
libraries = [Path(sys.prefix, "lib", f"libtbbmalloc{kind}.so.2") for kind in ("", "_proxy")]
if all(library.exists() for library in libraries) and not {*" :"} & {*sys.prefix}:
    os.environ.setdefault("LD_PRELOAD", ":".join(map(str, libraries)))

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")
# Plain text on any terminal, as wide as without one.
os.environ["COLUMNS"] = "80"
for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)
# No compilation cache: tests that read compiled programs need them compiled anew, and nothing may
# be left in a home directory.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
# Costs are traced once for all of pytest's processes: a cache file appears whole or not at all.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="mtx-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# The tests compile hundreds of programs and run each once: LLVM's optimisations, jax 0.10's new
# fusion emitters and code generation split over several threads cost more than they save. They come
# after everything that the tests read in a compiled program.
os.environ["XLA_FLAGS"] = " ".join([
    os.environ.get("XLA_FLAGS", ""),
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
])  # fmt: skip
# Nor do the tests read the source line of an op, which takes a tenth of the compile time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
use_virtual_devices(8)
# Traced programs are many long-lived objects: collecting garbage as often as Python would, after
# every 700 new objects and again among older ones, takes a tenth of the tests' time.
gc.set_threshold(1_000_000, 50, 100)

# A busy machine is not a failure.
settings.register_profile("mtx", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mtx")


def _with_a_large_frame():
    """A function that calls another from a frame of 70,000 variables, so that all frames of that
    call lie in one block of Python's stack. Python 3.11 maps a new block whenever a call crosses a
    block's end, and unmaps it on return: JAX's tracing, hundreds of calls deep, does so all the
    time, which takes a twentieth of the tests' time."""
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


def pytest_sessionfinish():
    """Leave what the tests have made to the operating system: pytest and Python would search all of
    it for garbage several times, which takes ten seconds."""
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Start the longest first; otherwise one process of two waits for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_types.py")


@pytest.fixture(scope="module")
def kept_programs(tmp_path_factory):
    """Keep compiled programs for the module's other runs, as `mtx train` does."""
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
    """Have LLVM optimise the training steps: these run often enough to be worth it."""
    options = {"xla_backend_optimization_level": 2}
    monkeypatch.setattr("mtx.step.xla.options", lambda *_, **__: options)


@pytest.fixture
def quick_orders(monkeypatch):
    """Search only briefly for the order of a woven tick: any order computes the same."""
    monkeypatch.setattr("mtx.pipeline.anneal._MOVES", 600)
    monkeypatch.setattr("mtx.pipeline.blocks._TRIALS", 24)


@pytest.fixture
def few_presets(monkeypatch):
    """Few presets, so that the largest that fits is found quickly: each has its layers traced."""
    monkeypatch.setattr("mtx.plan.fit.NAMES", ("miniature", "gpt-1.7b", "gpt-18b"))


@pytest.fixture
def usual_interrupt():
    """Ctrl-C raises even if the tests were started in the background, where it is ignored."""
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
