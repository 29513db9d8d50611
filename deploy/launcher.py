"""The console script `drafthouse`: picks the role and hands over. Imports only the role that was asked for."""

import importlib
import importlib.metadata
import sys

from protocol.options import refuse

ROLES = {
    "serve": ("deploy.serve", "an engine and its frontends on this machine"),
    "engine": ("engine.__main__", "one engine: the model, drafting and verifying"),
    "frontend": ("frontend.__main__", "one frontend: the OpenAI HTTP API and /metrics"),
    "keys": ("deploy.keys", "make the keys that encrypt the wire between machines"),
    "report": ("deploy.report", "pictures of what speculation did, from a live server or a trace file"),
}


def main() -> int:
    arguments = sys.argv[1:]
    command = arguments[0] if arguments else "--help"
    if command == "--version":
        sys.stdout.write(f"drafthouse {importlib.metadata.version('drafthouse')}\n")
        return 0
    if command in ("--help", "-h"):
        sys.stdout.write(_help())
        return 0 if arguments else 2
    if command not in ROLES:
        refuse("drafthouse", f"there is no command {command!r}: use one of {', '.join(ROLES)}, --version or --help")
    sys.argv[:] = [f"drafthouse {command}", *arguments[1:]]
    code = importlib.import_module(ROLES[command][0]).main()
    return int(code)


def _help() -> str:
    lines = ["usage: drafthouse COMMAND [options]", ""]
    lines += [f"  {name:<10}{what}" for name, (_, what) in ROLES.items()]
    return "\n".join([*lines, "", "drafthouse COMMAND --help lists the options of a command.", ""])


if __name__ == "__main__":
    sys.exit(main())
