"""Random programs, by hand and through fastai: laws that hold whatever is done in whichever order.

A failure shows its seed and a program made small. Other seeds:
`python tests/test_random_programs.py by_hand 1000-3000`, or `fastai`.
"""

import logging
import sys
import time
import warnings
from collections import Counter
from typing import NamedTuple

import programs_by_hand
import programs_fastai
import pytest
from programs import INVALID, LAWS, Failure, check, check_seed, shrink, smaller

MAKE = {"by_hand": programs_by_hand.by_hand, "fastai": programs_fastai.with_fastai}


def check_seeds(seeds, kind):
    """Check these programs; plain training has to take all of them but a few."""
    not_taken = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's and fastai's, of orders that are made up
        for seed in seeds:
            INVALID.clear()
            check_seed(seed, MAKE[kind], check, LAWS)
            if INVALID:  # a line for each law
                not_taken[seed] = INVALID[0]
    assert len(not_taken) <= 2, not_taken


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_by_hand(start):
    check_seeds(range(start, start + 20), "by_hand")


@pytest.mark.parametrize("start", range(0, 100, 10))
def test_with_fastai(start):
    check_seeds(range(start, start + 10), "fastai")


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
    """Check many seeds; return whether a law was broken."""
    first, last = map(int, seeds.split("-"))
    failed, began = 0, time.time()
    warnings.simplefilter("ignore")
    logging.getLogger("mixedfp").setLevel(logging.CRITICAL)
    for seed in range(first, last):
        try:
            check_seed(seed, MAKE[kind], check, LAWS)
        except Failure as e:
            failed += 1
            print(e, flush=True)
    print(
        f"{kind}: {last - first} seeds, {failed} failed, plain training did not take "
        f"{len(INVALID)} runs {Counter(INVALID)}; {time.time() - began:.0f} s"
    )
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
