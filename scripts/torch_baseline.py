# pyright: reportMissingImports=false
"""The torch arm of bench_generate.py: greedy generation with transformers, float32, prompts (JSON texts) on stdin."""

import json
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Print {"rates": {"1": tokens/s, "8": tokens/s}, "versions": ...} as the last line."""
    path, tokens = Path(sys.argv[1]), int(sys.argv[2])
    prompts = [json.loads(line) for line in sys.stdin]
    kwargs = {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), padding_side="left", **kwargs)
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.float32, **kwargs).eval()
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in prompts
    ]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rates = {}
    for batch in (1, 8):
        inputs = tokenizer(texts[:batch], return_tensors="pt", padding=True, add_special_tokens=False)
        timed = []
        for _ in range(3):  # the first warms up
            start = time.perf_counter()
            with torch.inference_mode():
                out = model.generate(
                    **inputs, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, use_cache=True
                )
            timed.append((out.shape[1] - inputs["input_ids"].shape[1]) * batch / (time.perf_counter() - start))
        rates[str(batch)] = max(timed[1:])
    print(
        json.dumps({"rates": rates, "versions": {"torch": torch.__version__, "transformers": transformers.__version__}})
    )


if __name__ == "__main__":
    main()
