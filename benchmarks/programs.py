"""How long a program takes to say what it can do."""

import subprocess
import sys
from functools import partial
from pathlib import Path

from .harness import Result, measure


def start(program: str, peer: str, folder: Path, pairs: int) -> Result:
    """``program --help`` against Python running ``peer``, each a process of its own."""
    del folder
    script = Path(sys.executable).with_name(program)
    run = partial(subprocess.run, check=True, capture_output=True)
    return measure(lambda: run([str(script), "--help"]), lambda: run([sys.executable, "-c", peer]), pairs)
