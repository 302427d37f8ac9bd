"""The plot of the schedule report: lower bounds of time, a panel a work, a bar a kernel and generation."""

from pathlib import Path

import matplotlib.pyplot as plt

_COLOURS = {"tpu": "tab:blue", "jax": "tab:orange", "tokamax": "tab:green"}
_TERMS = {"bundles_us": "_", "products_us": "x", "hbm_us": "o"}


def plot(rows: list[dict], path: Path) -> None:
    """Write the plot. Args: rows: as in the JSON, in order of work and generation."""
    works = list(dict.fromkeys(row["work"] for row in rows))
    columns = min(len(works), 3)
    lines = -(-len(works) // columns)
    figure, panels = plt.subplots(lines, columns, figsize=(5.2 * columns, 3.6 * lines), squeeze=False)
    for panel in panels.flat[len(works) :]:
        panel.set_visible(False)
    for work, panel in zip(works, panels.flat, strict=False):
        mine = [row for row in rows if row["work"] == work]
        at = range(len(mine))
        colours = [_COLOURS.get(row["kernel"].split("/")[0], "tab:gray") for row in mine]
        panel.bar(at, [row["bound_us"] for row in mine], color=colours, alpha=0.6)
        for term, marker in _TERMS.items():
            panel.scatter(at, [row[term] for row in mine], marker=marker, color="black", s=40, label=term[:-3])
        names = [f"{row['generation']} {row['kernel']}\n{row['limiting_unit']}" for row in mine]
        panel.set_xticks(list(at), names, rotation=60, ha="right", fontsize=6)
        panel.set_title(work, fontsize=9)
        panel.set_ylabel("lower bound, us")
    panels.flat[0].legend(fontsize=7)
    figure.suptitle("TPU lower bounds of time from the compiler's schedule (not measurements); name: busiest unit")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
