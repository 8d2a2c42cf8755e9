"""Plots the results of `kvloft bench copy`: GB/s by page size, and the ceiling."""

from typing import Any


def plot_copy(result: dict[str, Any], path: str) -> None:
    """Write a PNG to ``path``. Raises ImportError if matplotlib is not installed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    pages = [row["page_bytes"] / 1024 for row in result["pages"]]
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for what, label, colour in (
        ("save", "save", "C0"),
        ("load", "load", "C1"),
        ("both", "both, per direction", "C2"),
    ):
        axes.plot(pages, [row[what] for row in result["pages"]], "o-", color=colour, label=label)
        compressed = [row["compressed"][what] for row in result["pages"] if "compressed" in row]
        if len(compressed) == len(pages):
            axes.plot(pages, compressed, "s--", color=colour, label=f"{label}, compressed")
        axes.axhline(
            result["ceiling"][what], color=colour, linestyle=":", label=f"one large copy, {what}"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(pages, [f"{page:g}" for page in pages])
    axes.set_ylim(0, 85 if any("compressed" in row for row in result["pages"]) else 60)
    axes.set_xlabel("page size, KiB")
    axes.set_ylabel("GB/s")
    axes.set_title(
        f"{result['machine']['gpu']}, driver {result['machine']['driver']}, "
        f"{result['machine']['date']}"
    )
    axes.legend(fontsize="small", ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
