"""The README's module runs as it stands, decoding after a prefill as one forward would."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
from jattn import AttnSpec, ForwardMode, PagedKV, make_plan
from jattn.models.layers import split_heads
from jattn.models.rope import rope

README = Path(__file__).parents[1] / "README.md"


def test_the_flax_module_of_the_readme_runs_in_jit_and_decodes_like_prefill():
    source = re.search(r"runs this -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert source
    scope: dict[str, Any] = dict(nnx=nnx, AttnSpec=AttnSpec, jattn=jattn, split_heads=split_heads, rope=rope)
    exec(source[1], scope)  # noqa: S102  (our own text)
    layer = scope["Attn"](32, 4, 2, 8, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (7, 32))
    table = np.array([[3, 1, 0]])
    graphdef, params = nnx.split(layer)

    @jax.jit
    def forward(params, x, cache, plan):
        return nnx.merge(graphdef, params)(x, cache, plan, 0)

    def empty():
        return PagedKV.create(layer.spec, num_layers=1, num_pages=4, page_size=4)

    whole, _ = forward(params, x, empty(), make_plan(ForwardMode.EXTEND, [7], [7], table, page_size=4))
    out, cache = forward(params, x[:6], empty(), make_plan(ForwardMode.EXTEND, [6], [6], table, page_size=4))
    last, _ = forward(params, x[6:], cache, make_plan(ForwardMode.DECODE, [7], [1], table, page_size=4))
    np.testing.assert_allclose(jnp.concatenate([out, last]), whole, rtol=1e-5, atol=1e-5)


def test_the_readme_names_every_option_of_generate():
    from jattn.cli import _parser

    (commands,) = [a for a in _parser()._actions if hasattr(a, "choices") and a.choices and "generate" in a.choices]
    assert isinstance(commands.choices, dict)
    options = [o for action in commands.choices["generate"]._actions for o in action.option_strings]
    text = README.read_text()
    missing = [o for o in options if o.startswith("--") and o != "--help" and o not in text]
    assert missing == []
