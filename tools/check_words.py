"""Looks for phrases that read as translated, and for sentences without a subject.

The callback, autograd, the optimizer or a loop acts, and is named. Pages, code and guides are
read; tests are not. `PLAIN` has the phrases that were found so far, and what to write; `PROSE`
those that code may use. Pages for users contain "bit for bit" eight times at most.
"""

import re
import sys
from pathlib import Path

import nbformat
from figures import MARK
from notebooks import ROOT, all_notebooks

VAGUE = re.compile(r"\b(nobody|somebody|someone|everybody|everyone|anybody|anyone|whoever)\b", re.I)
THINGS = (
    "autograd|backward pass|callback|class|comment|docstring|error|figure|forward pass|function|"
    "guide|hook|message|method|model|module|notebook|optimizer|page|plot|process|scaler|step|test"
)
PLAIN = {  # a pattern: what to write
    r"\bto be had\b": "is available",
    r"\b(training|model|run|loop|second|other)s? goes on\b": "continues",
    r"\b(mend|cure|heal)(s|ed|ing)?\b": "fix",
    r"\bmakes? no sense\b": "invalid",
    r"\b(page|line|file|table|report|lesson|row|notebook)s? (says?|tells?|asks?)\b": "shows",
    r"\bhas said so\b": "shows it",
    r"\"Be (copied|pickled)\b": "Copy and pickle",
    r"\bwith all inside\b": "and its children",
    r"\bwhat there is to\b": "name the things",
    r"\b(in|at) one look\b": "at a glance",
    r"\bby the clock\b": "based on timing",
    r"\b(takes?|taken|taking) back\b": "restore",
    r"\blets? go of\b": "release",
    r"\blet .{3,30} follow\b": "update",
    r"\bstands in the\b": "replaces",
    r"\band the like work\b": "such as",
    r"\bis no step\b": "changes nothing",
    r"\b[Ww]ho (wants|reads|needs|comes|trains)\b": "a user who",
    r"\b(by|for|of|to) whoever\b": "name the user",
    r"(^|[.:;(] )[Ww]ho (has|is|was|does|calls|loads|writes)\b": "a user who",
    r"(^|[.;:#] |\"\"\"|> )What (is|was|are|were|has|had|it|this|that|each|the) [^?]*$": "a noun",
    r"\bwhat (is|was|are|were|has|had) \w+( \w+)? (is|are|was|were|has|becomes|stays)\b": "a noun",
    rf"\b({THINGS})s? (says?|asks?|sees?|tells?|wants?|knows?)\b": "contains, needs, gets",
    r"\b(?<!\w_)(rooms?|at hand|beside (it|the|a|its))\b": "module, available, in addition to",
    r"\bone after the other\b": "one by one",
}
PROSE = {
    r"\bours\b": "mixedfp",
    r"\b0\.\d+ of (its|autocast|float32|the)\b": "times, × or %",
    r"\bbytes a (parameter|number)\b": "per",
}
EXACT, MOST = "bit for bit", 8
TEXTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")]
TEXTS += [p for folder in ("tools", "bench") for p in (ROOT / folder).glob("*.py")]


def unidiomatic(text: str, phrases: dict[str, str]) -> list[str]:
    """Give the lines of `text` that have such a word, with what to write."""
    found = [f"{line.strip()}   (name it)" for line in text.splitlines() if VAGUE.search(line)]
    for pattern, plain in phrases.items():
        lines = [line.strip() for line in text.splitlines() if re.search(pattern, line)]
        found += [f"{line}   ({plain})" for line in lines]
    return found


def main() -> None:
    """Print each place and end with 1, if there is one."""
    places = {path: path.read_text() for path in TEXTS}
    del places[Path(__file__).resolve()]
    found, n_exact = [], 0
    for path in all_notebooks():
        cells = nbformat.read(path, 4).cells
        places[path] = "\n".join(c.source for c in cells)
        prose = MARK.sub("", "\n".join(c.source for c in cells if c.cell_type == "markdown"))
        found += [(path, line) for line in unidiomatic(prose, PROSE)]
        if path.name == "index.ipynb" or path.parent.name in ("guides", "tutorials"):
            n_exact += prose.count(EXACT)
            found += [(path, f"{EXACT}: once more than {MOST} times")] * (n_exact > MOST)
    found += [(path, line) for path, text in places.items() for line in unidiomatic(text, PLAIN)]
    for path, line in found:
        print(f"{path.relative_to(ROOT)}: {line}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
