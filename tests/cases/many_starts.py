"""Start one role many times from one warm process: each start is a fork that runs the role's real `main`.

Importing the tensor library costs seconds and is the same in every start, so it is done once. Reads one JSON list of arguments
per line of stdin, answers each with a line `[exit code, seconds, output, peak bytes]`. Run as a process of its own by
`tests.cases.processes.warm_starts`.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

TIMEOUT_S = 20


def main() -> None:
    role = sys.argv[1]
    module = importlib.import_module(f"{role}.__main__")
    if role == "engine":
        importlib.import_module("engine.model_executor")
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_start(module, role, json.loads(line))) + "\n")
        sys.stdout.flush()


def _start(module: Any, role: str, arguments: list[str]) -> list[Any]:
    with tempfile.TemporaryFile() as output:
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            _run(module, role, arguments, output.fileno())
        _, status, usage = os.wait4(child, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return [os.waitstatus_to_exitcode(status), time.monotonic() - started, text, usage.ru_maxrss * 1024]


def _run(module: Any, role: str, arguments: list[str], output: int) -> None:
    """In the child: never returns."""
    code = 99
    try:
        signal.alarm(TIMEOUT_S)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = [f"drafthouse {role}", *arguments]
        code = module.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
