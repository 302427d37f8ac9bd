"""What a DeepSeek config.json says of latent attention and of routing. Each key is read, or refused by name.

Sources: https://huggingface.co/deepseek-ai/DeepSeek-V2 and DeepSeek-V3 (config.json and the modelling code beside it),
https://huggingface.co/docs/transformers/model_doc/deepseek_v3.
"""

import math
from typing import Any

from jattn.loaders.arches import Family
from jattn.loaders.fields import Fields
from jattn.loaders.hparams import RopeScaling

SILENT = frozenset("aux_loss_alpha seq_aux ep_size".split())  # of training
# topk_method -> what it is here: groups are scored by their best expert, or by their best two with the learned bias
_METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "group_limited_greedy": dict(group_score="max"),
    "noaux_tc": dict(group_score="top2", score_bias=True),
}
_SCORINGS = ("softmax", "sigmoid")
_OF_EXPERTS = (
    "moe_intermediate_size n_shared_experts num_experts_per_tok first_k_dense_replace moe_layer_freq topk_method "
    "scoring_func norm_topk_prob routed_scaling_factor n_group topk_group"
).split()


def latent_attention(fields: Fields, family: Family) -> dict[str, Any]:
    """Widths of latent attention as fields of `HParams`, `head_dim` and the kv heads included."""
    nope, rotary = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    heads = fields.count("num_attention_heads")
    fields.expect("head_dim", rotary, "as qk_rope_head_dim says")
    fields.expect("qk_head_dim", nope + rotary, "qk_nope_head_dim + qk_rope_head_dim")
    fields.expect("num_key_value_heads", heads, "latent attention has a key and a value for every query head")
    if rotary % 2:
        raise fields.error("qk_rope_head_dim", rotary, "want an even number of rotated features")
    return dict(
        num_kv_heads=heads,
        head_dim=nope + rotary,
        kv_lora_rank=fields.count("kv_lora_rank"),
        q_lora_rank=None if fields.get("q_lora_rank") is None else fields.count("q_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotary,
        v_head_dim=fields.count("v_head_dim"),
        adjacent_rope=fields.flag("rope_interleave", True),
    )


def latent_scale(fields: Fields, head_dim: int, scaling: RopeScaling | None) -> float:
    """Factor on q . k: head_dim ** -0.5, times the square of YaRN's gain where `mscale_all_dim` asks for it."""
    given = fields.get("rope_parameters", fields.get("rope_scaling", {}))
    all_dim = Fields(given, label="rope ").optional("mscale_all_dim")
    if scaling is None or scaling.factor is None or scaling.factor <= 1 or all_dim is None:
        return head_dim**-0.5
    return head_dim**-0.5 * (0.1 * all_dim * math.log(scaling.factor) + 1.0) ** 2


def routing(fields: Fields, family: Family) -> dict[str, Any]:
    """The mixture of experts as fields of `HParams`; {} for a model without."""
    if fields.get("n_routed_experts") is None:
        for key in _OF_EXPERTS:
            fields.get(key)  # they say nothing then
        return {}
    method = fields.get("topk_method", family.topk_method)
    if not isinstance(method, str) or method not in _METHODS:
        raise fields.error("topk_method", method, f"want one of {', '.join(_METHODS)}")
    scoring = fields.get("scoring_func", family.scoring)
    if scoring not in _SCORINGS:
        raise fields.error("scoring_func", scoring, f"want one of {', '.join(_SCORINGS)}")
    count, width = fields.count("n_routed_experts"), fields.count("moe_intermediate_size")
    top_k = fields.count("num_experts_per_tok")
    if top_k > count:
        raise fields.error("num_experts_per_tok", top_k, f"want at most n_routed_experts={count}")
    return dict(
        num_experts=count,
        experts_per_token=top_k,
        expert_ffn_dim=width,
        shared_ffn_dim=width
        * (0 if fields.get("n_shared_experts") is None else fields.count("n_shared_experts", least=0)),
        first_expert_layer=fields.count("first_k_dense_replace", 0, least=0),
        expert_every=fields.count("moe_layer_freq", 1),
        scoring=scoring,
        norm_topk=_norm_topk(fields, family),
        routed_scale=fields.real("routed_scaling_factor", 1.0),
        **_METHODS[method],
        **_groups(fields, grouped=method != "greedy", count=count, top_k=top_k),
    )


def _norm_topk(fields: Fields, family: Family) -> bool:
    if family.scoring == "sigmoid":
        return fields.flag("norm_topk_prob", True)
    # DeepSeek's code then leaves routed_scaling_factor out, others apply both, transformers neither; no model has it
    fields.expect("norm_topk_prob", False, "what it means with softmax scores is not agreed on")
    return False


def _groups(fields: Fields, *, grouped: bool, count: int, top_k: int) -> dict[str, int]:
    given = {name: fields.get(name) for name in ("n_group", "topk_group")}
    if not grouped or given["n_group"] is None:
        return {}
    groups, best = (fields.count(name) for name in given)
    if count % groups:
        raise fields.error("n_group", groups, f"want groups of one size of n_routed_experts={count}")
    if best > groups or top_k > best * (count // groups):
        rule = f"want at most n_group={groups}, and room for num_experts_per_tok={top_k} of {count // groups} a group"
        raise fields.error("topk_group", best, rule)
    return dict(num_groups=groups, top_groups=best)
