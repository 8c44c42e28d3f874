"""The names for fastai users, imported by `from mixedfp.all import *`."""

from . import __all__, fsdp  # the package's names; adds `fsdp_ctx` to Learner
from .callback import MixedPrecision, PrecisionRecorder, mixed_precision
from .cast import bn2float, model2half, to_float, to_half
from .checkpoint import Checkpoint
from .diagnose.audit import PrecisionAudit, precision_audit
from .diagnose.memory import memory_of
from .diagnose.overflow import Overflow, find_overflow
from .diagnose.report import PrecisionReport, precision_report
from .engine.forward import computing
from .engine.masters import masters_of
from .examples import Darknet, cifar10, photos
from .formats import MixedPrecisionError, is_lost, ulp
from .layerwise import LayerwiseGradientScaler
from .master import get_master, master2model, model_g2master_g
from .optimizer import with_masters
from .resume import load_checkpoint, random_states, save_checkpoint, set_random_states
from .scaler import LossScaler
from .skorch import MixedPrecisionMixin
from .trainers import MastersPrecision, use_masters
