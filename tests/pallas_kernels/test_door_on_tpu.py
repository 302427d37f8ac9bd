"""The public cases once more, answered by the interpreted TPU kernels; and a real model on them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jattn

ROOT = Path(__file__).resolve().parents[2]


PARTS = dict(cases=4, properties=4)  # each of some minutes on one core


@pytest.mark.long
@pytest.mark.parametrize(
    ("tests", "part"), [(tests, f"{part}/{parts}") for tests, parts in PARTS.items() for part in range(1, parts + 1)]
)
def test_the_door_holds_with_the_tpu_kernels(tests, part, tmp_path):
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    log = tmp_path / "served"
    options = ["-q", "-n", "0", "-o", "addopts=--import-mode=importlib", "-p", "on_tpu", "-m", "not long"]
    options += ["-k", "not ragged and not pallas"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env |= dict(PYTHONPATH=path, ON_TPU_LOG=str(log), ON_TPU_RACES="1" if tests == "cases" else "", ON_TPU_PART=part)
    command = [sys.executable, "-m", "pytest", *options, f"tests/jattn/test_attend_{tests}.py"]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    served = [line.split() for line in log.read_text().splitlines()]
    assert sum(int(count) for op, count, *_ in served if op == "attend") >= 30 // PARTS[tests]


@pytest.mark.long
def test_generating_on_interpreted_tpu_kernels_gives_the_reference_ids():
    want = json.loads((ROOT / "tests" / "data" / "smollm2.json").read_text())
    case = want["prompts"]["capital"]
    (answer,) = jattn.generate(
        case["text"], platform="tpu-v6e", dtype="float32", draft="none", max_new_tokens=4, max_context=64, max_batch=1
    )
    assert answer.ids == case["numpy"]["greedy32"][:4]
