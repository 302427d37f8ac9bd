"""A table and a plot of the rows of `bench_attention.py`."""


def table(rows: list[dict]) -> str:
    """A text table of the rows."""
    lines = [
        f"{'shape':36} {'peer':18} {'ms':>9} {'GB/s':>7} {'TF/s':>6} {'% roof':>6} {'error':>8} {'spread':>6}  config"
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['shape']:36} {row['peer']:18} {row['error'][:100]}")
            continue
        lines.append(
            f"{row['shape']:36} {row['peer']:18} {row['ms']:9.4f} {row['gbps']:7.0f} {row['tflops']:6.1f} "
            f"{row['pct_of_roof']:6.1f} {row['max_rel_err']:8.1e} {row['spread']:6.3f}  {row['config']}"
        )
    return "\n".join(lines)


def plot(rows: list[dict], path: str) -> None:
    """Bars: percent of the roof, a shape a group, a peer a colour."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [row for row in rows if "ms" in row]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(11, 0.32 * len(shapes) + 1.5))
    for i, peer in enumerate(peers):
        mine = {row["shape"]: row["pct_of_roof"] for row in rows if row["peer"] == peer}
        height = 0.8 / len(peers)
        places = [shapes.index(shape) + i * height for shape in mine]
        axes.barh(places, list(mine.values()), height=height, label=peer)
    axes.set_yticks([i + 0.4 for i in range(len(shapes))], shapes)
    axes.invert_yaxis()
    axes.set_xlabel("% of the roof (copy bandwidth or matmul rate, the larger bound)")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
