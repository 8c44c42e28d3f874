"""The check that figures in prose are those that were measured, and messages those printed."""

import re

import nbformat
import pytest
from figures import problems
from notebooks import ROOT

RIGHT = [
    "a loss of 0.41<!--= printed bf16: loss -->",
    "it is right for 84%<!--= printed bf16: loss --> of the images",
    "half, 50 %<!--= set -->, of 3 networks",
    "with `n=3 times`, $2 %$, and\n\n    python it.py  # 20 MB\n",
    "no more than 1.0 times<!--= whole fp32 speed max --> as fast",
]
WRONG = {  # and what is said about it
    "a loss of 0.42<!--= printed bf16: loss -->": "[0.405, 0.844]",
    "it is right for 80 %<!--= printed bf16: loss -->": "[40.5, 84.4]",
    "twice, 2.0 times<!--= whole fp32 speed --> as fast": "whole fp32 speed is [1.0]",
    "1<!--= whole no-such-way speed -->": "nothing is named",
    "1<!--= guessed -->": "nothing is named",
    "1<!--= printed nothing like this -->": "is []",
    "trains 3.5 times as fast": "without a mark",
    "saves 40 % of it": "without a mark",
}


@pytest.mark.parametrize("prose", [*RIGHT, *WRONG])
def test_a_wrong_figure_is_named_and_a_right_one_passes(prose):
    shown = nbformat.v4.new_output("stream", text="bf16: loss 0.405, accuracy 84.4%\n")
    cells = nbformat.v4.new_code_cell(outputs=[shown]), nbformat.v4.new_markdown_cell(prose)
    found = list(problems(nbformat.v4.new_notebook(cells=list(cells))))
    assert len(found) == (prose in WRONG) and WRONG.get(prose, "") in "".join(found)


def messages(cells):
    """Return for each heading that is a message what is printed below it, up to the next."""
    printed, message = {}, None
    for cell in cells:
        is_text = cell.cell_type == "markdown"
        for heading in re.findall(r"^## (.+)$", cell.source, re.M) if is_text else ():
            message = heading.strip("`") if heading.startswith("`") else None
            printed |= {message: ""} if message else {}
        if message and not is_text:
            printed[message] += "".join(o.get("text", "") for o in cell.outputs)
    return printed


def test_each_message_of_the_troubleshooting_page_is_printed_on_it():
    page = nbformat.read(ROOT / "nbs" / "guides" / "troubleshooting.ipynb", 4)
    found = messages(page.cells)
    assert len(found) == 7
    assert [message for message, printed in found.items() if message not in printed] == []
