"""Trains neural networks in 16 bits with float32 master weights.

Names are imported when they are first used, so that none needs a trainer that is not installed.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .all import *  # noqa: F403

__version__ = "0.1.0"

_MODULES = {
    "callback": "MixedPrecision mixed_precision PrecisionRecorder",
    "cast": "bn2float model2half to_float to_half",
    "checkpoint": "Checkpoint",
    "diagnose.audit": "precision_audit PrecisionAudit",
    "diagnose.memory": "memory_of",
    "diagnose.overflow": "find_overflow Overflow",
    "diagnose.report": "precision_report PrecisionReport",
    "engine.forward": "computing",
    "engine.masters": "masters_of",
    "examples": "Darknet cifar10 photos",
    "formats": "MixedPrecisionError is_lost ulp",
    "layerwise": "LayerwiseGradientScaler",
    "master": "get_master master2model model_g2master_g",
    "optimizer": "with_masters",
    "resume": "random_states set_random_states save_checkpoint load_checkpoint",
    "scaler": "LossScaler",
    "skorch": "MixedPrecisionMixin",
    "trainers": "MastersPrecision use_masters",
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = [*_WHERE]  # pyright: ignore


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
