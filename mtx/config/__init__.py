"""The definition of a run, as frozen dataclasses: model, layout, optimizer, data, guard."""

from mtx.config.data import DataConfig as DataConfig
from mtx.config.layout import Idle as Idle
from mtx.config.layout import Layout as Layout
from mtx.config.layout import Recompute as Recompute
from mtx.config.optimizer import OptimizerConfig as OptimizerConfig
from mtx.config.run import GuardConfig as GuardConfig
from mtx.config.run import RunConfig as RunConfig
from mtx.config.run import from_dict as from_dict
from mtx.config.run import to_dict as to_dict
from mtx.families import ComputeDtype as ComputeDtype
from mtx.families import ModelConfig as ModelConfig
