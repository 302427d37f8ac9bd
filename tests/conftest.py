"""How every test runs: strict JAX, four fake CPU devices, derandomised properties."""

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("jattn", derandomize=True, deadline=None, print_blob=True, database=None)
hypothesis.settings.load_profile("jattn")
