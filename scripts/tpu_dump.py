"""Read libtpu's dump of a compiled kernel: the bundles of its steady-state loop, and what they use.

One bundle is what the core issues in a cycle when nothing stalls. The files are those of `DUMP_ARGS`.
"""

import collections
import dataclasses
import itertools
import re
from pathlib import Path

DUMP_ARGS = "--xla_jf_dump_to={0} --xla_jf_dump_llo_text=true"
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +([A-Z]{2})? *: >* *\{")
_BRANCH = re.compile(r"sbr\.rel (?:\((!?%\w+)\) )?target = \$region(\d+)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_VMEM = re.compile(r"#allocation\d+ \[.*space=vmem, size = (0x[0-9a-f]+)")
_START = re.compile(r"= dma\.(?:hbm_to_vmem|general)\b")
_DELAY = 4  # bundles after a branch that still run
_TESTED = 8  # predicates of several branches that are told apart


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The steady-state loop of a kernel: the innermost one with the most products.

    Where code in it is skipped at times, counts are those of the shortest path that makes all products.
    """

    kernel: str
    bundles: int  # of the steady path
    all_bundles: int  # of the loop, skipped code included
    matmuls: int  # instructions that feed a matrix unit
    copies: int  # bundles of loops within it that start copies, after their first pass; `bundles` includes them
    used: dict[str, int]  # slots, by unit
    capacity: dict[str, int]  # slots a bundle
    spills: int  # vector registers stored and loaded again in the loop
    vmem_bytes: int  # allocated, the compiler's own scratch included

    @property
    def shares(self) -> dict[str, float]:
        """Slots used of those there are."""
        return {unit: self.used[unit] / (self.capacity[unit] * self.bundles) for unit in self.used}

    @property
    def limiting_unit(self) -> str:
        """The unit that is busiest; fills and spills count as the loads and stores that they are."""
        shares = {unit: share for unit, share in self.shares.items() if ":" not in unit}
        return max(shares, key=lambda unit: shares[unit])


def kernels(folder: Path) -> list[str]:
    """Names of the kernels and fusions that a dump is of."""
    found = (re.fullmatch(r"\d+-(.+)-\d+-final_bundles\.txt", path.name) for path in folder.iterdir())
    return sorted(match[1] for match in found if match and match[1] != "TLP" and not match[1].startswith("<"))


def steady_loop(folder: Path, kernel: str, copies: int = 0) -> Loop:
    """The steady-state loop of the one kernel whose name contains `kernel`; of several, the one with most products.

    Args: copies: from HBM to vector memory that a trip starts. Of paths with as many products, the one that starts most
      of them counts; loops on it that start copies run until all are started.
    Raises: ValueError if there is none, or it makes no products.
    """
    loops = [_of(folder, name, copies) for name in kernels(folder) if kernel in name]
    loops = [loop for loop in loops if loop is not None]
    if not loops:
        raise ValueError(f"no kernel named like {kernel!r} makes products; the dump has {', '.join(kernels(folder))}")
    return max(loops, key=lambda loop: loop.matmuls)


def _of(folder: Path, name: str, copies: int) -> Loop | None:
    texts, begins = _bundles(_only(folder, name, "final_bundles").read_text())
    units, capacity, rows = _utilization(_only(folder, name, "final_hlo-static-per-bundle-utilization").read_text())
    products = [text.count("vmatmul") for text in texts]
    if not any(products):
        return None
    if len(rows) != len(texts):
        raise ValueError(f"{name}: {len(texts)} bundles but {len(rows)} rows of use: the dump reads differently")
    loops = _loops(texts, begins)
    first, end = _innermost(loops, products)
    starts = [len(_START.findall(text)) for text in texts]
    path = _steady(texts, products, starts, copies, first, end)
    made = sum(starts[i] for i in path)
    taken = [bundle for bundle in path if starts[bundle]]
    within = [x for x in loops if first < x[0] and x[1] <= end and any(x[0] <= i < x[1] for i in taken)]
    again = [(b - a, sum(starts[a:b])) for a, b in within]
    more = min((-(-(copies - made) // count) * size for size, count in again), default=0) if made < copies else 0
    if made < copies and not again:
        raise ValueError(f"{name}: a trip starts {made} copies of {copies}: the dump reads differently")
    used = {unit: sum(rows[i][at] for i in path) for at, unit in enumerate(units)}
    return Loop(
        kernel=name,
        bundles=len(path) + more,
        copies=more,
        all_bundles=end - first,
        matmuls=sum(products[i] for i in path),
        used=used,
        capacity=dict(zip(units, capacity, strict=True)),
        spills=used.get("VSTORE:SPILL", 0) + used.get("VLOAD:FILL", 0),
        vmem_bytes=sum(int(size, 16) for size in _VMEM.findall(_only(folder, name, "original").read_text())),
    )


def _only(folder: Path, name: str, kind: str) -> Path:
    paths = [p for p in folder.iterdir() if re.fullmatch(rf"\d+-{re.escape(name)}-\d+-{kind}\.txt", p.name)]
    if len(paths) != 1:
        raise ValueError(f"{len(paths)} files of {kind} for {name}: want one; dump one compilation at a time")
    return paths[0]


def _bundles(text: str) -> tuple[list[str], list[bool]]:
    # each bundle's text, and whether a loop begins there
    texts, begins = [], []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match:
            texts.append(line)
            begins.append(match[1] == "LB")
        elif texts:  # a comment with a line break in it
            texts[-1] += line
    return texts, begins


def _utilization(text: str) -> tuple[list[str], list[int], list[list[int]]]:
    lines = text.splitlines()
    units = [unit.strip() for unit in lines[1].split(",")]
    rows = [[int(x) for x in line.split()] for line in lines[4:] if line.strip()]
    return units, [int(x) for x in lines[2].split()], rows


def _loops(texts: list[str], begins: list[bool]) -> list[tuple[int, int]]:
    # first bundle of each loop, and one past its last
    back = {}
    for i, text in enumerate(texts):
        for _, region in _BRANCH.findall(text):
            back[int(region)] = i  # the last branch to a region
    loops = []
    for first in (i for i, begin in enumerate(begins) if begin):
        ends = [back[int(r)] for r in _REGION.findall(texts[first]) if back.get(int(r), -1) >= first]
        if ends:
            loops.append((first, min(max(ends) + _DELAY + 1, len(texts))))
    return loops


def _innermost(loops: list[tuple[int, int]], products: list[int]) -> tuple[int, int]:
    # the loop with most products outside of loops within it; all of the kernel where there is no loop
    def own(loop):
        within = [x for x in loops if loop[0] < x[0] and x[1] <= loop[1]]
        return sum(n for i, n in enumerate(products[slice(*loop)], loop[0]) if not any(a <= i < b for a, b in within))

    return max(loops, key=own) if any(map(own, loops)) else (0, len(products))


def _steady(texts: list[str], products: list[int], starts: list[int], copies: int, first: int, end: int) -> list[int]:
    # bundles of the path from `first` to `end` with most products; of those, most of the copies; and the shortest
    regions = {int(r): i for i in range(first, end) for r in _REGION.findall(texts[i])}
    jumps: dict[int, tuple[int, bool, str]] = {}  # where a branch takes effect: its target, and when it is taken
    for i in range(first, end):
        branch = _BRANCH.search(texts[i])
        target = regions.get(int(branch[2]), 0) if branch else 0
        if branch and target > i + _DELAY:
            jumps[min(i + _DELAY, end - 1)] = (
                target,
                not (branch[1] or "").startswith("!"),
                (branch[1] or "").strip("!"),
            )
    # A predicate that several branches test is the same for all of them: code for one case excludes the other's.
    names = collections.Counter(name for _, _, name in jumps.values())
    tested = [name for name, count in names.most_common(_TESTED) if count > 1]
    paths = []
    for values in itertools.product((False, True), repeat=len(tested)):
        paths.append(_path(products, starts, copies, jumps, dict(zip(tested, values, strict=True)), first, end))

    def rank(path):
        return sum(products[i] for i in path), min(sum(starts[i] for i in path), copies), -len(path)

    return max(paths, key=rank)


def _path(products, starts, copies: int, jumps, known: dict[str, bool], first: int, end: int) -> list[int]:
    # best way to each cut between branches, for each number of copies started: their prefix decides nothing by itself
    cuts = sorted({first, end, *(i + 1 for i in jumps), *(target for target, _, _ in jumps.values())})
    cuts = [cut for cut in cuts if first <= cut <= end]
    came: dict[int, dict[int, tuple[tuple[int, int], int, int]]] = {cut: {} for cut in cuts}
    came[first][0] = ((0, 0), -1, 0)
    for at, after in itertools.pairwise(cuts):
        made, begun = sum(products[at:after]), sum(starts[at:after])
        ways = [after]
        if after - 1 in jumps:
            target, when, name = jumps[after - 1]
            ways = [target] if not name or known.get(name) is when else ways
            ways = ways + [target] if name and name not in known else ways
        for started, ((so_far, cost), _, _) in came[at].items():
            now = min(started + begun, copies)
            value = (so_far + made, cost - (after - at))
            for to in ways:
                if now not in came[to] or value > came[to][now][0]:
                    came[to][now] = (value, at, started)
    started = max(came[end], key=lambda n: (came[end][n][0][0], n, came[end][n][0][1]))
    path, at = [], end
    while at != first:
        _, before, earlier = came[at][started]
        after = cuts[cuts.index(before) + 1]
        path.extend(range(after - 1, before - 1, -1))
        at, started = before, earlier
    return path[::-1]
