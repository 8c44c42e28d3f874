"""What each module loads: the core is for people without fastai, skorch and matplotlib."""

import subprocess
import sys
from pathlib import Path

import pytest

import mixedfp

CORE = "formats testing cast master scaler layerwise step optimizer skorch resume".split()
CORE += ["diagnose.report"]
OTHERS = ("fastai", "skorch", "matplotlib")
HERE = Path(mixedfp.__file__).parent


def printed_by(code):
    """Run `code` in a fresh process; return the words that it prints."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def loaded_by(statement):
    """Run `statement` in a fresh process; return which of OTHERS it has loaded."""
    return printed_by(f"import sys\n{statement}\nprint(*[m for m in {OTHERS} if m in sys.modules])")


def test_the_core_loads_torch_alone():
    """One process for all of the core: what the first one loads, none of the others may have.

    What is for skorch is among them: it needs nothing until it is mixed in.
    """
    assert loaded_by("\n".join(f"import mixedfp.{name}" for name in CORE)) == []
    assert loaded_by("def f():\n    import matplotlib\nf()") == ["matplotlib"]  # late, but seen


OF_FASTAI = "MixedPrecision mixed_precision PrecisionRecorder Checkpoint Darknet cifar10 photos"


def test_a_name_of_the_package_loads_its_own_module_alone():
    names = ", ".join({*mixedfp.__all__} - {*OF_FASTAI.split()})
    assert loaded_by(f"from mixedfp import {names}") == []
    lazy = "import sys, mixedfp; print(*(m for m in sys.modules if m in ('torch', 'fastcore')))"
    assert printed_by(lazy) == [] and {*mixedfp.__all__} <= {*dir(mixedfp)}
    with pytest.raises(ImportError, match="cannot import name 'with_mastres'"):
        exec("from mixedfp import with_mastres")


def test_the_star_import_has_every_name_of_the_package_and_no_trainer():
    loads = "lightning", "transformers", "accelerate", "skorch"
    code = "import sys\nfrom mixedfp.all import __all__ as names\nprint(*names)"
    code += f"\nprint(*(m for m in {loads} if m in sys.modules))"
    assert {*printed_by(code)} == {*mixedfp.__all__}


@pytest.mark.parametrize("order", [("fastai.vision", "mixedfp"), ("mixedfp", "fastai.vision")])
def test_the_later_star_import_names_mixed_precision(order):
    """`to_fp16` and `mixed_precision` are ours in both orders, the shared name in one."""
    found = {}
    for package in order:
        exec(f"from {package}.all import *", found)
    later = "mixedfp.callback" if order[1] == "mixedfp" else "fastai.callback.fp16"
    assert found["MixedPrecision"].__module__ == later
    learner = found["Learner"]
    ours = found["mixed_precision"].func, learner.to_fp16, learner.to_bf16
    assert {f.__module__ for f in ours} == {"mixedfp.callback"}


def test_what_is_installed_has_every_module(tmp_path):
    """An editable install shows the folder as it is; a wheel has what setup.py names."""
    pytest.importorskip("setuptools")
    build = ["egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", tmp_path / "lib"]
    subprocess.run([sys.executable, "setup.py", "-q", *build], cwd=HERE.parent, check=True)
    folders = tmp_path / "lib" / HERE.name, HERE
    built, here = ({p.relative_to(f) for p in f.rglob("*.py")} for f in folders)
    assert built == here and (folders[0] / "py.typed").exists()
