"""Attention of one request in NumPy float64, written from the definition: what the door must compute."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportOptionalSubscript=false, reportCallIssue=false

import numpy as np


def visible(q_len, kv_len, *, mask="causal", sliding_window=None, tree=None):
    """bool [q_len, kv_len]: which keys a query sees.

    Args: tree: dict of `start`, `bits` bool [q_len, nodes], `q_positions` [q_len], `kv_positions` [nodes].
    """
    keys = np.arange(kv_len)
    own = kv_len - q_len + np.arange(q_len)  # the queries are the newest keys
    places = keys
    if mask == "full":
        seen = np.ones((q_len, kv_len), bool)
    elif mask == "causal":
        seen = keys[None] <= own[:, None]
    else:
        start = tree["start"]
        seen = np.concatenate([np.ones((q_len, start), bool), tree["bits"][:, : kv_len - start]], axis=1)
        places = np.concatenate([keys[:start], tree["kv_positions"][: kv_len - start]])
        own = tree["q_positions"]
    if sliding_window is not None:
        seen = seen & (places[None] > own[:, None] - sliding_window)
    return seen


def attend(q, k, v, seen, *, sm_scale, logit_soft_cap=None, sinks=None):
    """out [q_len, q_heads, v_dim] and lse [q_len, q_heads] (sinks left out) of one request.

    Args: q: [q_len, q_heads, d]. k, v: [kv_len, kv_heads, d | v_dim], dequantised. seen: from `visible`.
      sinks: [q_heads].
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    q_len, q_heads, _ = q.shape
    group = q_heads // k.shape[1]
    out = np.zeros((q_len, q_heads, v.shape[2]))
    lse = np.full((q_len, q_heads), -np.inf)
    for row in range(q_len):
        picked = np.flatnonzero(seen[row])
        if not picked.size:
            continue
        for head in range(q_heads):
            scores = k[picked, head // group] @ q[row, head] * sm_scale
            if logit_soft_cap is not None:
                scores = logit_soft_cap * np.tanh(scores / logit_soft_cap)
            top = scores.max()
            weights = np.exp(scores - top)
            total = weights.sum()
            lse[row, head] = top + np.log(total)
            if sinks is not None:
                total = total + np.exp(float(sinks[head]) - top)
            out[row, head] = weights @ v[picked, head // group] / total
    return out, lse
