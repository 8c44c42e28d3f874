"""Random programs, by hand and through fastai: laws that hold whatever is done in whichever order.

A failure shows its seed and a program made small. Other seeds:
`python tests/test_random_programs.py by_hand 1000-3000`, or `fastai`.
"""

import sys
import time
import warnings
from collections import Counter
from typing import NamedTuple

import programs_by_hand
import programs_fastai
import pytest
from programs import Failure, check_seed, shrink, smaller

HAND = programs_by_hand.by_hand, programs_by_hand.check_by_hand, programs_by_hand.LAWS
FASTAI = programs_fastai.with_fastai, programs_fastai.check_with_fastai, programs_fastai.LAWS


def check_seeds(seeds, make, check, laws):
    """Check these programs; plain training has to take all of them but two."""
    invalid, not_taken = sys.modules[check.__module__].INVALID, {}
    for seed in seeds:
        invalid.clear()
        check_seed(seed, make, check, laws)
        if invalid:  # a line for each law
            not_taken[seed] = invalid[0]
    assert len(not_taken) <= 2, not_taken


@pytest.mark.parametrize("start", range(0, 300, 25))
def test_by_hand(start):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of orders that a program makes up
        check_seeds(range(start, start + 25), *HAND)


@pytest.mark.parametrize("start", range(0, 150, 15))
def test_with_fastai(start):
    check_seeds(range(start, start + 15), *FASTAI)


class Word(NamedTuple):
    """A letter, many times."""

    letter: str = "a"
    times: int = 1


class Text(NamedTuple):
    """What a program is made of."""

    words: tuple = ()
    size: int = 0


def test_a_failing_program_is_made_small():
    """What is left is what the failure needs; each part of it was tried without."""
    words = tuple(Word(letter, 7) for letter in "badcafe")
    small = shrink(Text(words, 5), lambda text: {"c", "f"} <= {word.letter for word in text.words})
    assert small == Text((Word("c"), Word("f")))
    assert Text((Word("f"),)) in smaller(small)


def test_a_failure_shows_its_seed_and_its_program():
    def check(text, law):
        return "AssertionError: too long" if len(text.words) > 1 else None

    def make(rng):
        return Text(tuple(Word() for _ in range(4)), rng.randrange(1, 9))

    with pytest.raises(Failure, match=r"seed 3, law: .*\n  Text\(words=\(Word.*Word.*size=0\)"):
        check_seed(3, make, check, {"law": None})


def main(kind, seeds):
    """Check many seeds, and say how many broke a law."""
    make, check, laws = {"by_hand": HAND, "fastai": FASTAI}[kind]
    module = sys.modules[check.__module__]
    first, last = map(int, seeds.split("-"))
    failed, began = 0, time.time()
    warnings.simplefilter("ignore")
    for seed in range(first, last):
        try:
            check_seed(seed, make, check, laws)
        except Failure as e:
            failed += 1
            print(e, flush=True)
    print(
        f"{kind}: {last - first} seeds, {failed} failed, plain training did not take "
        f"{len(module.INVALID)} runs {Counter(module.INVALID)}; {time.time() - began:.0f} s"
    )
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
