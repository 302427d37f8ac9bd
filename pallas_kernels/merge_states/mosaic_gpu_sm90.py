"""Placeholder until the kernel lands in this series: the plain form."""

from pallas_kernels.merge_states.xla import merge_states as merge_states
