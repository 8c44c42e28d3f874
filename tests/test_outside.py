"""The check that only `inside.py` knows what is not public. LIB stands for the library's name."""

import pytest
from outside import reaches_inside

BAD = [
    "from LIB.step import LARGE",
    "from LIB.step import MixedStep, OptimizerOnMasters",
    "from LIB import onepass",
    "import LIB.onepass",
    "import LIB.step\nLIB.step.LARGE = 1",
    "from LIB import step as s\nmonkeypatch.setattr(s, 'LARGE', 1)",
    "monkeypatch.setattr('LIB.step.LARGE', 1)",
    "def test():\n    from LIB.cast import notice_once",
    "from LIB.engine.flat import Bucket",
    "from LIB import compare\ncompare.untar_data",
    "opt._on",
    "learn.mp_cb.mixed._attached",
    "learn.mp_cb.mixed.masters.model",
    "learn.opt.buckets[0]",
    "mixed.exclusive = True",
    "getattr(scaler, '_host', ())",
    "patch.setattr(opt, '_taker', None)",
    "from LIB.step import *",
    "PROGRAM = '''\nfrom LIB import step\nstep.LARGE = 1\n'''",
]
GOOD = [
    "from LIB.step import MixedStep, is_elementwise",
    "from LIB.all import *",
    "import LIB\nLIB.__file__",
    "import LIB.callback\nLIB.callback.MixedPrecision",
    "from LIB import examples\nexamples.photos()",
    "import inside\ninside.everything_is_large(patch)",
    "import torch, os\ntorch._foreach_add_\nos._exit(0)",
    "model._forward_hooks, p._version, point._replace(x=1)",
    "class A:\n    def f(self):\n        self._on = self.buckets = super()._g()",
    "'LIB.step.LARGE is what this is about'",
    '"""LIB.onepass"""',
    "learn.mp_cb.mixed.scaler.skipped, opt.update_paths()",
]


@pytest.mark.parametrize("source", BAD)
def test_what_is_inside_is_found(source):
    assert list(reaches_inside(source.replace("LIB", "mixedfp")))


@pytest.mark.parametrize("source", GOOD)
def test_what_is_public_is_left_alone(source):
    assert not list(reaches_inside(source.replace("LIB", "mixedfp")))


def test_the_line_is_named():
    source = "x = 1\n\n\ny = opt._on\n"
    (text,) = reaches_inside(source)
    assert text.startswith("line 4: opt._on is not public")
