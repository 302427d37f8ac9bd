"""Write tiny random checkpoints of every decoder family, with the logits that transformers computes from them.

Run it with Python 3.11, torch==2.13.0 and transformers==5.24.0 (none of them a dependency of this project):

    python scripts/make_hf_fixtures.py tests/data/hf

Each folder is a whole Hugging Face checkpoint in float32, and `expected.npz` and `expected.json` beside it: logits of
two prompts that share a beginning, greedy ids after each, and the smallest gap between the two best logits on that way.
Parameters are drawn large, and windows, contexts and caps small, so that every feature moves the logits.
"""

import argparse
import json
import pathlib
import shutil

import numpy as np
import tokenizers
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers.modeling_layers import MtpModel  # pyright: ignore[reportMissingImports]

SIZES = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
)
HEAD = dict(head_dim=12)  # not hidden_size / heads
YARN = dict(  # a ramp from feature 1.4 to 3.2 of 6
    rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=1000.0, beta_fast=1.0, beta_slow=0.125
)
# folder -> (model_type, config fields, whether words are spelt as SentencePiece does, bytes a shard)
FAMILIES = {
    "llama-linear": ("llama", dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=500.0)), True, None),
    "llama-llama3": (
        "llama",
        dict(
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
                rope_theta=10000.0,
            ),
            **HEAD,
        ),
        False,
        None,
    ),
    "llama-yarn": ("llama", dict(rope_parameters=YARN, **HEAD), False, None),
    "mistral": ("mistral", dict(sliding_window=9, **HEAD), True, None),
    "qwen2": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=11, max_window_layers=1, tie_word_embeddings=True),
        False,
        None,
    ),
    "qwen3": ("qwen3", dict(**HEAD), False, None),
    "gemma2": (
        "gemma2",
        dict(
            sliding_window=8,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=4.0,
            **HEAD,
        ),
        True,
        None,
    ),
    "gemma3": (
        "gemma3_text",
        dict(
            sliding_window=8,
            query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=2.0, rope_theta=5000.0),
                sliding_attention=dict(rope_type="default", rope_theta=200.0),
            ),
            **HEAD,
        ),
        True,
        None,
    ),
    "gpt-oss": (
        "gpt_oss",
        dict(
            sliding_window=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            swiglu_limit=1.0,
            rope_parameters=dict(**YARN, truncate=False),
            **HEAD,
        ),
        False,
        "60KB",
    ),
}
MLA = dict(  # widths that differ from each other, so that no two can be confused
    num_key_value_heads=4,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    moe_intermediate_size=20,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
)
MLA_YARN = YARN | dict(beta_slow=0.5, mscale=0.707, mscale_all_dim=1.1)  # unequal: cos and sin are scaled, too
FAMILIES |= {
    "deepseek-v2": (  # as V2-Lite: queries in one matrix, greedy routing
        "deepseek_v2",
        dict(
            q_lora_rank=None, topk_method="greedy", rope_parameters=dict(rope_type="default", rope_theta=100.0), **MLA
        ),
        False,
        None,
    ),
    "deepseek-v2-groups": (
        "deepseek_v2",
        dict(
            q_lora_rank=16,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.7,
            rope_parameters=MLA_YARN,
            **MLA,
        ),
        False,
        None,
    ),
    "deepseek-v3": (
        "deepseek_v3",
        dict(
            q_lora_rank=16,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            num_mtp_layers=1,
            rope_parameters=MLA_YARN | dict(mscale=1.0, mscale_all_dim=1.0),
            **MLA,
        ),
        False,
        None,
    ),
}
TEXT = "A small text, to be cut into known pieces."


def build(model_type: str, fields: dict, seed: int):
    """The model with every parameter drawn."""
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    fill(model, model_type, np.random.default_rng(seed))
    return model


def fill(model, model_type: str, draw: np.random.Generator) -> None:
    """Draw every parameter."""
    for name, parameter in model.named_parameters():
        values = draw.standard_normal(parameter.shape)
        if "norm" in name:
            centre = 0.0 if model_type.startswith("gemma") else 1.0
            values = centre + 0.4 * values
        elif "embed" in name:
            values = values * (0.25 if model.config.tie_word_embeddings else 1.0)  # or each token's best is itself
        elif name.endswith("bias") or name.endswith("sinks"):
            values = 1.5 * values
        else:
            fan_in = parameter.shape[-2] if parameter.ndim == 3 else parameter.shape[-1]
            values = values * (2.0 if "q_proj" in name or "k_proj" in name else 1.0) / fan_in**0.5
        parameter.data.copy_(torch.from_numpy(values.astype(np.float32)))
    fill_buffers(model, draw)
    model.tie_weights()


def fill_buffers(model, draw: np.random.Generator) -> None:
    """Draw what is learned and no parameter."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.from_numpy(0.3 * draw.standard_normal(buffer.shape).astype(np.float32)))


def next_token(model, seed: int, ids: list[int]) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """The layer that predicts a token further ahead: its tensors by public names, and its logits."""
    layer = MtpModel(model, 1).float().eval()
    tied = {id(parameter) for parameter in model.parameters()}
    draw = np.random.default_rng(seed + 50)
    for name, parameter in layer.named_parameters():
        if id(parameter) in tied:
            continue
        values = draw.standard_normal(parameter.shape)
        values = 1.0 + 0.4 * values if "norm" in name else values / parameter.shape[-1] ** 0.5
        parameter.data.copy_(torch.from_numpy(values.astype(np.float32)))
    fill_buffers(layer, draw)
    front = f"model.layers.{model.config.num_hidden_layers}."
    tensors = {f"{front}embed_tokens.weight": model.model.embed_tokens.weight}  # copies, as published
    tensors[f"{front}shared_head.head.weight"] = model.lm_head.weight
    for name, value in layer.state_dict().items():
        if not name.startswith("layers.0."):
            continue
        name = name.removeprefix("layers.0.").replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
        if "mlp.experts.gate_up_proj" in name:
            for expert, both in enumerate(value):
                for part, half in zip(("gate", "up"), both.chunk(2), strict=True):
                    tensors[f"{front}mlp.experts.{expert}.{part}_proj.weight"] = half
        elif "mlp.experts.down_proj" in name:
            for expert, down in enumerate(value):
                tensors[f"{front}mlp.experts.{expert}.down_proj.weight"] = down
        else:
            tensors[front + name] = value
    hidden = model.model(torch.tensor([ids])).last_hidden_state[:, :-1]
    positions = torch.arange(1, len(ids))[None]
    hidden = layer.forward_layer(0, hidden, positions, None, input_ids=torch.tensor([ids[1:]]))
    return {name: value.detach().clone().contiguous() for name, value in tensors.items()}, model.lm_head(hidden)[
        0
    ].numpy()


def greedy(model, ids: list[int], count: int) -> tuple[list[int], float]:
    """The next `count` ids without a cache, and the smallest gap between the best two logits on the way."""
    new, gap = [], np.inf
    for _ in range(count):
        best = model(torch.tensor([ids + new])).logits[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        new.append(int(best.indices[0]))
    return new, gap


def tokenizer(sentence_piece: bool) -> tokenizers.Tokenizer:
    """A BPE over letters and a few merges, in the spelling of byte-level or of SentencePiece vocabularies."""
    space = "\u2581" if sentence_piece else "\u0120"
    chars = [chr(i) for i in range(0x21, 0x7F) if chr(i) not in "{}|~^`"]
    merges = [(space, "t"), ("t", "e"), ("o", "w"), ("e", "c"), ("n", "ow"), (f"{space}t", "e")]
    entries = ["<unk>", "<s>", "</s>", space, *chars, *(a + b for a, b in merges)]
    vocab = {entry: i for i, entry in enumerate(entries)}
    bpe = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True)
    made = tokenizers.Tokenizer(bpe)
    if sentence_piece:
        made.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
        made.decoder = decoders.Sequence(
            [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def write(folder: pathlib.Path, seed: int) -> None:
    """One checkpoint and what is expected of it."""
    model_type, fields, sentence_piece, shard = FAMILIES[folder.name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made = tokenizer(sentence_piece)
    made.save(str(folder / "tokenizer.json"), pretty=False)
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    names = dict(bos_token="<s>", eos_token={"content": "</s>", "special": True})
    names |= {} if shard else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if shard:
        (folder / "chat_template.jinja").write_text(template)
    draw = np.random.default_rng(seed + 1)
    start = draw.integers(3, 128, 12)
    start = [*start, *start[:8], *draw.integers(3, 128, 4)]  # with a passage that comes twice
    prompts = [[int(i) for i in (*start, *draw.integers(3, 128, count))] for count in (16, 12)]
    while True:
        model = build(model_type, fields, seed)
        with torch.no_grad():
            logits = [model(torch.tensor([ids])).logits[0].numpy() for ids in prompts]
            ways = [greedy(model, ids, 12) for ids in prompts]
        if min(gap for _, gap in ways) > 0.01 and min(len(set(ids)) for ids, _ in ways) > 2:
            break
        seed += 100  # another model, whose choices do not hang on rounding, and change
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    more = {}
    if model.config.to_dict().get("num_nextn_predict_layers"):
        with torch.no_grad():
            tensors, more["logits_next"] = next_token(model, seed, prompts[0])
        save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "generation_config.json").unlink(missing_ok=True)
    for file in folder.iterdir():
        file.chmod(0o644)
    np.savez_compressed(folder / "expected.npz", **{f"logits_{i}": row for i, row in enumerate(logits)}, **more)
    expected = dict(
        transformers=transformers.__version__,
        torch=torch.__version__,
        seed=seed,
        prompts=prompts,
        greedy=[ids for ids, _ in ways],
        least_gap=min(gap for _, gap in ways),
        text=TEXT,
        text_ids=made.encode(TEXT).ids,
    )
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")
    print(f"{folder.name}: seed {seed}, least gap {expected['least_gap']:.3f}, greedy {ways[0][0]}")


def main() -> None:
    """Write every folder, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("names", nargs="*", default=list(FAMILIES))
    args = parser.parse_args()
    for seed, name in enumerate(FAMILIES):
        if name in args.names:
            write(args.out / name, seed)


if __name__ == "__main__":
    main()
