"""`import mtx`: every name is there, and stays what it is whatever else is imported."""

import subprocess
import sys

import mtx

CHECK = """
import importlib, pkgutil, mtx
before = {name: getattr(mtx, name) for name in mtx.__all__}
for module in pkgutil.iter_modules(mtx.__path__):
    if module.name != "__main__":
        importlib.import_module(f"mtx.{module.name}")
changed = [name for name, value in before.items() if getattr(mtx, name) is not value]
assert not changed, changed
"""


def test_no_name_is_a_module_as_well():
    subprocess.run([sys.executable, "-c", CHECK], check=True)


def test_names_are_listed():
    assert dir(mtx) == sorted(mtx.__all__) and "run_training" in mtx.__all__
