"""The tests of the door once more on a GPU, answered by the Hopper kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NARROW = "bf16 or bfloat16 or f16 or float16"


@pytest.mark.device
@pytest.mark.parametrize("form", ["decode", "prefill"])
def test_the_public_cases_and_the_properties_hold_with_the_hopper_kernels(tmp_path, form):
    tests = [f"tests/jattn/test_attend_{name}.py" for name in ("cases", "properties")]
    served = _run(tmp_path, form, tests, "not long")
    assert served["attend"] >= (60 if form == "decode" else 40)


@pytest.mark.device
def test_the_public_latent_cases_hold_with_the_hopper_kernels(tmp_path):
    tests = ["tests/jattn/combinators/test_mla_cases.py"]
    assert _run(tmp_path, "decode", tests, "long or not long")["attend_latent"] >= 8


def _run(tmp_path, form: str, tests: list[str], marks: str) -> dict[str, int]:
    # calls of each op that the kernels served in these tests
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    log = tmp_path / "served"
    options = [
        "-q",
        "-n",
        "8",
        "-o",
        "addopts=--import-mode=importlib",
        "-p",
        "on_hopper",
        "-m",
        marks,
        "-k",
        NARROW,
    ]
    plugins = [word for name in ("cacheprovider", "benchmark") for word in ("-p", f"no:{name}")]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env |= dict(PYTHONPATH=path, XLA_PYTHON_CLIENT_PREALLOCATE="false", ON_HOPPER_LOG=str(log), ON_HOPPER_FORM=form)
    command = [sys.executable, "-m", "pytest", *options, *plugins, *tests]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    served: dict[str, int] = {}
    for line in log.read_text().splitlines():
        op, count, *_ = line.split()
        served[op] = served.get(op, 0) + int(count)
    return served
