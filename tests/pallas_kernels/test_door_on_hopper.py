"""The tests of the door once more on a GPU, answered by the Hopper kernels."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NARROW = "bf16 or bfloat16 or f16 or float16"


@pytest.mark.device
@pytest.mark.parametrize(("name", "least"), [("test_attend_cases", 40), ("test_attend_properties", 15)])
def test_the_public_cases_and_the_properties_hold_with_the_hopper_kernels(name, least):
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    options = ["-o", "addopts=--import-mode=importlib", "-p", "on_hopper", "-m", "not long", "-k", NARROW]
    plugins = [word for name in ("cacheprovider", "xdist", "benchmark") for word in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", "-q", *options, *plugins, f"tests/jattn/{name}.py"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env |= dict(PYTHONPATH=path, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    served = re.search(r"hopper/attend served (\d+) of", ran.stdout)
    assert served and int(served[1]) >= least, ran.stdout[-500:]
