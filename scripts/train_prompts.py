"""Code prompts for training draft heads: functions of installed packages, up to the end of their docstrings.

    python scripts/train_prompts.py --packages stdlib numpy scipy --to stubs.jsonl

Writes a JSON object a line with `prompt`, each function once, and beside it stubs.record.json: packages, versions,
number of prompts, SHA-256 of the file.
"""

import argparse
import ast
import hashlib
import importlib.metadata
import json
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

CHARS = (80, 900)  # of a prompt
IMPORTS = ("", "", "from typing import List\n\n\n", "import math\n\n\n", "from typing import List, Tuple\n\n\n")


def main() -> None:
    """Read the packages, write the prompts and their record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="+", default=["stdlib"], help="distributions; stdlib is Python's own")
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    seen: dict[str, None] = {}
    counts = {}
    for name in args.packages:
        before = len(seen)
        for path in _files(name):
            seen.update(dict.fromkeys(_stubs(path)))
        version = platform.python_version() if name == "stdlib" else importlib.metadata.version(name)
        counts[name] = {"version": version, "prompts": len(seen) - before}
    # what a file imports is not part of a stub, but of many a prompt
    lines = [json.dumps({"prompt": IMPORTS[i % len(IMPORTS)] + stub}) for i, stub in enumerate(seen)]
    text = "\n".join(lines) + "\n"
    args.to.write_text(text, encoding="utf-8")
    record = {"packages": counts, "prompts": len(lines), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    args.to.with_suffix(".record.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


def _files(name: str) -> list[Path]:
    if name == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        return [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    files = importlib.metadata.files(name) or []
    return sorted(Path(str(file.locate())) for file in files if file.suffix == ".py")


def _stubs(path: Path) -> Iterator[str]:
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
        return  # files that a test wants broken
    lines = source.splitlines()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and ast.get_docstring(node):
            stub = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]) + "\n"
            if CHARS[0] < len(stub) < CHARS[1]:
                yield stub


if __name__ == "__main__":
    main()
