"""What all tests share: OpenMP threads that sleep while they wait, as in the engine (see engine/assembly.py)."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is first imported
