"""Runs a command and passes its output on; shows that it still runs after 15 silent seconds.

In `python tools/patiently.py installing pip install -q -e .` the first word is shown there.
"""

import os
import subprocess
import sys
import threading
import time

SECONDS = 15


def main(what: str, *command: str) -> int:
    """Run `command`, named `what` in the lines; return its exit code."""
    start = last = time.monotonic()
    end_of_line = True

    def relay(pipe):
        nonlocal last, end_of_line
        while data := pipe.read1(65536):
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
            last, end_of_line = time.monotonic(), data.endswith(b"\n")

    def show(text):
        nonlocal last, end_of_line
        print("" if end_of_line else "\n", f"[{what}: {text}]", sep="", flush=True)
        last, end_of_line = time.monotonic(), True

    env = os.environ | {"PYTHONUNBUFFERED": "1"}  # so that output arrives when it is printed
    both = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with subprocess.Popen(command, env=env, **both) as process:
        thread = threading.Thread(target=relay, args=[process.stdout])
        thread.start()
        while thread.is_alive():
            thread.join(timeout=min(1, SECONDS))
            if time.monotonic() - last > SECONDS:
                show(f"{time.monotonic() - start:.0f} s so far")
    seconds = time.monotonic() - start
    if process.returncode:
        show(f"exit code {process.returncode}")
    elif seconds > SECONDS:
        show(f"done in {seconds:.0f} s")
    return process.returncode


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
