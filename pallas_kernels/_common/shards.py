"""Inside `shard_map`: a loop that starts from a constant and ends with what differs from shard to shard."""

import jax
from jax import lax


def varying_like(x, arrays):
    """`x` (a tree), counted as different on each shard along the mesh axes where any of `arrays` (a tree) is.

    A loop's carry must be so before the first step if it is after it. Elsewhere this changes nothing.
    """
    axes = frozenset().union(*(_axes(leaf) for leaf in jax.tree.leaves(arrays)))

    def cast(leaf):
        missing = tuple(sorted(axes - _axes(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, x)


def _axes(x) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
