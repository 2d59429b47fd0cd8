"""The names of `import mtx`, and where each is at home."""

from mtx.api import init_params as init_params
from mtx.api import loss_and_gradients as loss_and_gradients
from mtx.api import trainer_for as trainer_for
from mtx.config import DataConfig as DataConfig
from mtx.config import GuardConfig as GuardConfig
from mtx.config import Layout as Layout
from mtx.config import ModelConfig as ModelConfig
from mtx.config import OptimizerConfig as OptimizerConfig
from mtx.config import RunConfig as RunConfig
from mtx.data.corpus import load_data as load_data
from mtx.errors import UserError as UserError
from mtx.launch.start import use_virtual_devices as use_virtual_devices
from mtx.pipeline.formats import read_schedule as read_schedule
from mtx.pipeline.formats import to_csv as to_csv
from mtx.pipeline.formats import to_text as to_text
from mtx.pipeline.makers import make as make
from mtx.pipeline.orders import Orders as Orders
from mtx.pipeline.schedule import Schedule as Schedule
from mtx.pipeline.shape import Times as Times
from mtx.pipeline.simulate import Simulation as Simulation
from mtx.pipeline.simulate import simulate as simulate
from mtx.plan.hardware import Hardware as Hardware
from mtx.plan.hardware import hardware as hardware
from mtx.plan.hardware import load_hardware as load_hardware
from mtx.plan.plan import Plan as Plan
from mtx.plan.plan import load_plan as load_plan
from mtx.plan.plan import load_run as load_run
from mtx.plan.plan import make_plan as make_plan
from mtx.plan.plan import save_plan as save_plan
from mtx.plan.search import search as search
from mtx.presets import preset as preset
from mtx.sharding.mesh import make_mesh as make_mesh
from mtx.train.loop import run_training as run_training
from mtx.train.step import Trainer as Trainer
from mtx.view.mesh import MeshView as MeshView
from mtx.view.mesh import draw_mesh as draw_mesh
from mtx.view.mesh import mesh_text as mesh_text
from mtx.view.schedule import draw_timeline as draw_timeline
from mtx.view.schedule import show as show
from mtx.view.schedule import timeline_text as timeline_text
from mtx.view.trace import write_trace as write_trace

__version__: str
