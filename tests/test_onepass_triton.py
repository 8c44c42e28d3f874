"""The compiled pass as a GPU would run it: how many kernels, how wide, and with which numbers.

No GPU is needed: PyTorch's compiler emits for the simulated one what it would emit for a real one.
`emitted_update.py` has Triton's interpreter run that, and Triton compile it for two generations.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_cuda import why_not
from test_onepass import OPTIMIZERS, is_refused, net

HERE = Path(__file__).parent


def reason():
    """Say what is missing, None if nothing is."""
    if importlib.util.find_spec("triton") is None:
        return "there is no Triton to compile for a GPU"
    return why_not()


pytestmark = pytest.mark.skipif(reason() is not None, reason=str(reason()))

RECORDED = [name for name in OPTIMIZERS if not is_refused(name)]
IN_BFLOAT16 = "AdamW, bfloat16", "fastai SGD, bfloat16"


@pytest.fixture(scope="module")
def emitted(tmp_path_factory):
    """What was seen of each optimizer, in a process that has the simulated GPU."""
    path = tmp_path_factory.mktemp("emitted") / "results.json"
    paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, HERE / "emitted_update.py", path], env=env, check=True)
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_kernels_have_the_optimizers_numbers(name, emitted):
    """In float16, scaled: two ulps of the largest weight after three compiled steps or four."""
    seen = emitted[name]
    assert seen["paths"] == {"compiled": sum(p.numel() for p in net().parameters())}
    assert seen["ulps"] <= 2
    assert seen["is_rounded"]  # the model's 16 bits are those of its masters


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_kernels_have_the_optimizers_numbers_in_bfloat16(name, emitted):
    """The masters' alone: Triton's interpreter cuts bits off where a GPU rounds to bfloat16."""
    assert emitted[name]["ulps"] <= 2


@pytest.mark.parametrize("name", [*RECORDED, *IN_BFLOAT16])
def test_a_step_is_one_kernel_a_vector(name, emitted):
    """And one graph an update, which serves the trial on a few numbers and vectors of any size."""
    seen = emitted[name]
    assert seen["last_step"] == [0, 1]  # weights; norms and biases, whose gradients are in 32 bits
    # gradients are gathered; only the two parameters of a norm in 32 bits lie elsewhere
    assert seen["last_copies"] == [3, 5, 2]
    assert seen["n_graphs"] == seen["n_functions"] == len(seen["ptx"]) == 2


@pytest.mark.parametrize("arch", ["80", "90"])
@pytest.mark.parametrize("name", [*RECORDED, *IN_BFLOAT16])
def test_kernels_read_and_write_four_words_at_once(name, arch, emitted):
    """All that is as long as the vector. Of 8 elements in 32 bits that is two reads, in 16 one."""
    of_weights, of_norms = (ptx[arch] for ptx in emitted[name]["ptx"])
    for ptx in (of_weights, of_norms):
        assert {k for k in ptx if k.startswith("st.")} == {"st.global.v4.b32"}
    # what is read is written, and for the gradient in 16 bits the model's weights
    assert of_weights["ld.global.v4.b32"] == of_weights["st.global.v4.b32"]
    assert of_norms["ld.global.v4.b32"] == of_norms["st.global.v4.b32"] + 1


@pytest.mark.parametrize("name, n_bytes", [*zip(IN_BFLOAT16, [28, 20], strict=True)])
def test_no_byte_is_moved_twice(name, n_bytes, emitted):
    """AdamW: a gradient and a weight in 16 bits, a master and two states read and written."""
    ptx = emitted[name]["ptx"][0]["90"]
    n = ptx["ld.global.v4.b32"] + ptx["st.global.v4.b32"]
    assert 16 * n / 8 == n_bytes  # bytes at once; elements that a thread has in this form
