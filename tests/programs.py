"""Random networks and groups for random programs, and what makes a failing program small."""

import random
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from laws import DTYPES, small_chunks
from nets import LAYERS, STEMS, Layer, Net

from mixedfp.testing import assert_same

KINDS = tuple(k for k in LAYERS if k != "complex")  # PyTorch's scaler and clipping refuse it


def random_net(rng, kinds=KINDS, most=4):
    """Return a network drawn from `rng`, a `random.Random`."""
    layers = [
        Layer(
            rng.choice(kinds),
            residual=rng.random() < 0.3,
            tied=rng.random() < 0.3,
            used=rng.choice(["always"] * 5 + ["sometimes", "never"]),
        )
        for _ in range(rng.randint(0, most))
    ]
    return Net(rng.choice(list(STEMS)), tuple(layers))


def random_groups(rng, net, most=3):
    """Return places of parameters in groups, and those in no group; the head is trained always."""
    names = [name for name, _ in net.build().named_parameters()]
    body = [i for i, name in enumerate(names) if not name.startswith("head.")]
    head = [i for i, name in enumerate(names) if name.startswith("head.")]
    rng.shuffle(body)
    rng.shuffle(head)
    left_out = body[: rng.choice([0, 0, 0, 1, 2])]
    body = body[len(left_out) :]
    ends = sorted(rng.sample(range(len(body) + 1), min(rng.randint(1, most), len(body) + 1)))
    groups = [body[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    groups.append(body[ends[-1] :] + head)
    return tuple(tuple(group) for group in groups if group), tuple(left_out)


def in_groups(groups, params):
    """Return the parameters at these places, once each; a smaller program has fewer of them."""
    held, found = set(), []
    for places in groups:
        places = [i for i in dict.fromkeys(i % len(params) for i in places) if i not in held]
        found.append([params[i] for i in places])
        held.update(places)
    return found


# Failures made small


def smaller(o: Any) -> Iterator[Any]:
    """Yield all that is one change simpler than `o`, the largest changes first."""
    if isinstance(o, tuple) and hasattr(o, "_fields"):
        for field in o._fields:
            value, default = getattr(o, field), o._field_defaults.get(field, ...)
            if default is not ... and value != default:
                yield o._replace(**{field: default})
            if isinstance(value, tuple):
                yield from (o._replace(**{field: v}) for v in smaller(value))
    elif isinstance(o, tuple):
        size = len(o)
        while size:
            yield from (o[:i] + o[i + size :] for i in range(0, len(o), size))
            size //= 2
        for i, v in enumerate(o):
            if isinstance(v, tuple):
                yield from ((*o[:i], w, *o[i + 1 :]) for w in smaller(v))


def shrink(program: Any, fails: Callable[[Any], bool], tries: int = 500) -> Any:
    """Return a program that still fails, and none of those one change simpler does."""
    candidates, seen = smaller(program), set()
    while tries and (candidate := next(candidates, None)) is not None:
        if candidate in seen:
            continue
        seen.add(candidate)
        tries -= 1
        if fails(candidate):
            program, candidates = candidate, smaller(candidate)
    return program


class Failure(AssertionError):
    """What a random program has found."""


def check_seed(
    seed: int,
    make: Callable[[random.Random], Any],  # a program
    check: Callable[..., str | None],  # what breaks a law, or one law in particular
    laws: dict[str, Any],
) -> None:
    """Check the program of `seed`. Raises: Failure that shows it, made small."""
    program = make(random.Random(seed))
    for law in laws:
        found = check(program, law)
        if found is not None:
            small = shrink(program, lambda p: kind(check(p, law)) == kind(found))  # noqa: B023
            raise Failure(f"seed {seed}, {law}: {check(small, law)}\n  {small!r}")


# The laws: how a program is run, and which run it has to equal

LAWS = {
    "float32, a master each": (("float32", False), None),
    "float32, flat": (("float32", True), None),
    "16 bits, flat": (("half", True), ("half", False)),
}
INVALID: list[str] = []  # why plain training did not take a program


def check(program: Any, law: str) -> str | None:
    """Return how `program` breaks `law`, None where it does not, or where the law says nothing."""
    (dtype, flat), other = LAWS[law]
    dtype = DTYPES[program.dtype if dtype == "half" else dtype]
    try:
        expected = plain_run(program)
    except Exception as e:
        return INVALID.append(f"{type(e).__name__}: {e}")
    with small_chunks(program.cut):
        try:
            if other is not None:
                expected = program.run(dtype, other[1])
            run = program.run(dtype, flat)
            for a, b in zip(run, expected, strict=True):
                assert_same(a, b, name="log")
        except Exception as e:
            return f"{type(e).__name__}: {e}"


@lru_cache(maxsize=1)
def plain_run(program: Any) -> Any:
    """Run `program` plainly; what one law is held against, the next ones are as well."""
    return program.run()


def kind(found: str | None) -> str | None:
    """Return what stays of a message when the program becomes smaller."""
    return found and re.sub(r"[\d.\[\]']+", "", ":".join(found.split(":")[:2]))[:40]
