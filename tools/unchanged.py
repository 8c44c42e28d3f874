"""Runs a command and fails if it changed files in the repository, naming them.

    python tools/unchanged.py nbdev_export

It compares contents before and after, not with the last commit, so uncommitted work is fine.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

from notebooks import ROOT

WATCHED = ["mixedfp", "nbs", "index.ipynb", "pyproject.toml"]
PASSING = {"__pycache__", ".ipynb_checkpoints", ".last_checked"}


def snapshot() -> dict[Path, str]:
    """Return the hash of each watched file."""
    tops = [ROOT / name for name in WATCHED]
    files = [path for top in tops for path in [top, *top.rglob("*")] if path.is_file()]
    kept = [path for path in files if not PASSING.intersection(path.parts)]
    return {path.relative_to(ROOT): hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}


def main() -> int:
    """Run the command given by the arguments."""
    before = snapshot()
    code = subprocess.run(sys.argv[1:], cwd=ROOT, stdin=subprocess.DEVNULL).returncode
    after = snapshot()
    changed = sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p))
    for path in changed:
        print(f"{path}: changed by `{' '.join(sys.argv[1:])}`; review it, keep it, run this again")
    return code or (1 if changed else 0)


if __name__ == "__main__":
    sys.exit(main())
