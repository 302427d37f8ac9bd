"""What a person sees: progress on standard error, tables on standard output. rich draws; nothing here decides."""

import sys
from collections.abc import Mapping

import rich.console
import rich.progress
import rich.table

from jattn.kernel_sets import OPS, candidates
from jattn.platforms import Evidence, Platform


class Console:
    """A progress bar on standard error while a model is read and compiled; silent when asked, or without a terminal."""

    def __init__(self, *, quiet: bool = False):
        console = rich.console.Console(stderr=True)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=quiet or not sys.stderr.isatty(),
        )
        self._tasks: dict[str, rich.progress.TaskID] = {}

    def __enter__(self) -> "Console":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def progress(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` parts of `what` are ready."""
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(f"reading {what}" if what == "tensors" else f"compiling {what}")
        self._bar.update(self._tasks[what], completed=done, total=total)


def print_table(table: rich.table.Table) -> None:
    """Print at the terminal's width, or wide enough to lose nothing where there is no terminal."""
    console = rich.console.Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)


def platform_table(platforms: Mapping[str, Platform]) -> rich.table.Table:
    """One row a platform: its limits, and the evidence for each kernel that could serve it."""
    table = rich.table.Table("platform", "HBM GB/s", "bf16 TFLOP/s", "kernel sets", "policy", *OPS)
    for platform in platforms.values():
        table.add_row(
            platform.name,
            _number(platform.hbm_gbps),
            _number(platform.bf16_tflops),
            " > ".join(platform.kernel_sets),
            platform.default_policy,
            *(_evidence(platform, op) for op in OPS),
        )
    return table


def _evidence(platform: Platform, op: str) -> str:
    rows = candidates(op, platform.kernel_sets)
    return ", ".join(f"{row.set} {platform.evidence.get(row.name, Evidence.DECLARED)}" for row in rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
