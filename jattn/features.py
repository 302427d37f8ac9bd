"""What a kernel can be asked for, by name. A spec or a plan needs some of these; a kernel row provides some."""

import enum


class Feature(enum.StrEnum):
    """One capability of an attention kernel. Selection is `needed <= provided`, so a new capability is a new member."""

    PAGED = "paged"  # keys and values behind a page table
    RAGGED = "ragged"  # fresh keys and values, packed
    CAUSAL = "causal"  # bottom-right aligned
    FULL = "full"  # every key of the request is visible
    TREE = "tree"  # ancestor bits over draft nodes
    LSE = "lse"  # log-sum-exp output for merging
    WINDOW = "sliding_window"
    SOFT_CAP = "logit_soft_cap"
    SINKS = "sinks"
    UNEQUAL_HEAD_DIMS = "unequal_head_dims"  # v_head_dim != head_dim
    FP8_KV = "fp8_kv"
    INT8_KV = "int8_kv"
    TOKEN_SCALES = "per_token_scales"  # one scale a cached token and KV head
    MLA = "mla"
    # Known, and provided by no kernel here: named so that a request is refused by name, never half-served.
    ALIBI = "alibi"
    CROSS_ATTENTION = "cross_attention"
    CHUNKED_LOCAL = "chunked_local"
    BIDIRECTIONAL_SPANS = "bidirectional_spans"
    XAI_TEMPERATURE = "xai_temperature"
    SPARSE = "sparse"  # top-k or block selection (dsa, nsa, qsa, dsv4)
    LINEAR = "linear_attention"  # hybrid linear models
