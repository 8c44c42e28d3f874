"""Looks for sentences without a subject: a reader has to guess who "somebody" is.

What acts is named: the callback, autograd, the optimizer, a loop. Pages, code and guides are read;
tests are not.
"""

import re
import sys

import nbformat
from notebooks import ROOT, all_notebooks

VAGUE = re.compile(r"\b(nobody|somebody|someone|everybody|everyone|anybody|anyone|whoever)\b", re.I)
TEXTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]


def vague(text: str) -> list[str]:
    """Give the lines of `text` that have such a word."""
    return [line.strip() for line in text.splitlines() if VAGUE.search(line)]


def main() -> None:
    """Print each place and end with 1, if there is one."""
    places = {path: path.read_text() for path in TEXTS}
    for path in all_notebooks():
        places[path] = "\n".join(c.source for c in nbformat.read(path, 4).cells)
    found = [(path, line) for path, text in places.items() for line in vague(text)]
    for path, line in found:
        print(f"{path.relative_to(ROOT)}: {line}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
