"""Every example in a docstring of the packages runs and prints what it says."""

import doctest
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
import pallas_kernels

MODULES = sorted(
    info.name
    for package in (jattn, pallas_kernels)
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)
NAMES = {"jax": jax, "jnp": jnp, "np": np} | {name: getattr(jattn, name) for name in jattn.__all__}


def examples(module):
    """Docstrings of a module that have examples."""
    found = doctest.DocTestFinder().find(importlib.import_module(module), module, extraglobs=NAMES)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("module", MODULES)
def test_examples_of(module):
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    lines: list[str] = []
    for test in examples(module):
        runner.run(test, out=lines.append)
    assert not runner.failures, "".join(lines)


def test_the_examples_are_found():
    """A wrapper that hides a docstring would let its examples rot: they are counted, and some are named."""
    found = {test.name for module in MODULES for test in examples(module)}
    assert len(found) >= 30
    assert found >= {
        "jattn.attend.write_attend",
        "jattn.combinators.budget.choose",
        "jattn.modes.ForwardMode",
        "jattn.plan.make_plan",
        "jattn.resolve.resolve",
        "jattn.sampling.distribution.greedy",
        "jattn.spec.AttnSpec",
    }
