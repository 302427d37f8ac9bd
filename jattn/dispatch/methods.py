"""The forms in which an MLA layer can be computed."""

import enum


class AttnForwardMethod(enum.StrEnum):
    """One form of MLA attention: the same result, at a different cost.

    Expanded forms up-project the latents to full heads (192 + 128 a head); absorbed ones attend in the latent space
    (576 + 512 for every head at once).
    """

    MHA = "MHA"  # expanded, fresh tokens only; right where there is no cached prefix
    MLA = "MLA"  # absorbed
    MHA_CHUNKED_KV = "MHA_CHUNKED_KV"  # expanded: fresh tokens, then the prefix in chunks, merged by log-sum-exp
    MHA_ONE_SHOT = "MHA_ONE_SHOT"  # expanded: prefix and fresh tokens together
    MLA_FUSED_ROPE_ROCM = "MLA_FUSED_ROPE_ROCM"  # absorbed decode that rotates inside the kernel
    MLA_FUSED_ROPE_CPU = "MLA_FUSED_ROPE_CPU"  # absorbed, projections and rotation in one operation
    MHA_NPU = "MHA_NPU"
    MLA_NPU = "MLA_NPU"
    DSA_NPU = "DSA_NPU"  # absorbed over selected tokens
    # Names of rules="newer" on ROCm: the same mathematics as the method without the suffix.
    MHA_ROCM = "MHA_ROCM"
    MHA_ONE_SHOT_ROCM = "MHA_ONE_SHOT_ROCM"
    MHA_CHUNKED_KV_ROCM = "MHA_CHUNKED_KV_ROCM"
    MLA_ROCM = "MLA_ROCM"


METHODS: tuple[AttnForwardMethod, ...] = tuple(AttnForwardMethod)  # the order that traced indices refer to
