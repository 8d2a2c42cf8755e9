"""Draws the Grafana dashboard for a Prometheus server: `python scripts/dashboard.py OUT.png`.

Runs the queries in examples/deploy/grafana.json through Prometheus's HTTP API and draws all panels
with all variables set to All. Prints queries that return no data. Requires matplotlib.
"""

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import AutoDateLocator, DateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from PIL import Image

DASHBOARD = Path(__file__).resolve().parents[1] / "examples" / "deploy" / "grafana.json"
DPI, WIDTH_PX, ROW_PX = 100, 1400, 27
COLORS = ("#3d9a50", "#d9a514", "#3d7fc2", "#e07b2f", "#8b5fbf", "#c2468a", "#2aa198", "#7f7f7f")
LEGEND = {"frameon": False, "fontsize": 6.5, "labelspacing": 0.25, "borderaxespad": 0}
NUM_STEPS, NUM_SHADES, DAY_S = 240, 160, 86400
SUFFIXES = {"bytes": "B", "Bps": "B/s", "cps": "c/s"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    add = parser.add_argument
    add("png", metavar="OUT.png", type=Path)
    add("--prometheus", metavar="URL", default="http://localhost:9090", help="default: %(default)s")
    add("--end", metavar="UNIX_TIME", type=float, help="end of the time range (default: now)")
    add("--last", metavar="MINUTES", type=float, default=60, help="time range (default: 60)")
    add("--scrape", metavar="SECONDS", type=float, default=15, help="scrape interval (default: 15)")
    return parser.parse_args()


class Source:
    """Evaluates the dashboard's queries over one time range."""

    def __init__(self, args: argparse.Namespace, variables: list[dict[str, Any]]) -> None:
        self._end: float = args.end or time.time()
        self._start: float = self._end - 60 * args.last
        self._step = 60 * args.last / NUM_STEPS
        self.days = [(self._start + i * self._step) / DAY_S for i in range(NUM_STEPS + 1)]
        self._url = f"{args.prometheus.rstrip('/')}/api/v1/query_range"
        self._values = {v["name"]: v["allValue"] for v in variables if "allValue" in v}
        rate_interval = args.scrape + max(self._step, 3 * args.scrape)  # as in Grafana
        self._values["__rate_interval"] = f"{rate_interval:.0f}s"

    def curves(self, panel: str, target: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
        """Yield (legend, values) for each series, with one value or NaN per element of ``days``."""
        query = re.sub(r"\$(\w+)", lambda m: self._values[m[1]], target["expr"])
        fields = {"query": query, "start": self._start, "end": self._end, "step": self._step}
        try:
            with urllib.request.urlopen(f"{self._url}?{urllib.parse.urlencode(fields)}") as answer:
                found = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{panel}: query failed: {query}: {error.read().decode()}") from None
        if not found:
            print(f"{panel}: no data: {query}", file=sys.stderr)
        legend = re.sub(r"\{(\{\w+\})\}", r"\1", target["legendFormat"])
        for one in found:
            values = {round((at - self._start) / self._step): value for at, value in one["values"]}
            curve = [float(values.get(i, math.nan)) for i in range(NUM_STEPS + 1)]
            yield legend.format_map(one["metric"]), curve


def formatted(value: float, unit: str) -> str:
    """Format an axis value in one of the dashboard's units."""
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if 0 < value < 1 else f"{value:.3g} s"
    base = 1024 if unit == "bytes" else 1000
    power = min(4, int(math.log(value, base))) if value >= base else 0
    prefix = ("", "K", "M", "G", "T")[power] + ("i" if unit == "bytes" and power else "")
    return f"{value / base**power:.3g} {prefix}{SUFFIXES.get(unit, '')}"


def draw(figure: Figure, panel: dict[str, Any], source: Source) -> None:
    """Draw one panel with its legend below the plot."""
    place, title = panel["gridPos"], panel["title"]
    left, width = (place[name] * WIDTH_PX / 24 for name in "xw")
    top, height = (place[name] * ROW_PX for name in "yh")
    box(figure, left + 3, top + 3, width - 6, height - 6).set(xticks=[], yticks=[])
    found = [one for target in panel["targets"] for one in source.curves(title, target)]
    num_columns = int(width // (30 + 5 * max((len(label) for label, _ in found), default=1))) or 1
    legend_px = 13 * -(-len(found) // num_columns)
    axes = box(figure, left + 62, top + 28, width - 78, height - 55 - legend_px)
    for i, (label, curve) in enumerate(found):
        color, line = ("red", "--") if "limit" in label else (COLORS[i % len(COLORS)], "-")
        axes.plot(source.days, curve, line, color=color, linewidth=1.2, label=label)
    style(axes, panel["fieldConfig"]["defaults"]["unit"], source)
    x, y = -52 / axes.bbox.width, -20 / axes.bbox.height
    axes.set_title(title, fontsize=8.5, fontweight="bold", loc="left", x=x)
    if found:
        axes.legend(loc="upper left", bbox_to_anchor=(x, y), ncols=num_columns, **LEGEND)


def box(figure: Figure, left: float, top: float, width: float, height: float) -> Any:
    """Add and return axes at a position in pixels from the top left corner."""
    total = figure.bbox.height
    at = (left / WIDTH_PX, 1 - (top + height) / total, width / WIDTH_PX, height / total)
    axes = figure.add_axes(at)
    axes.spines[:].set_visible(False)
    return axes


def style(axes: Any, unit: str, source: Source) -> None:
    highest = max(0, axes.dataLim.y1) or 1  # ignores NaN
    axes.set(xlim=(source.days[0], source.days[-1]), ylim=(0, highest * 1.08))
    axes.xaxis.set_major_locator(AutoDateLocator(minticks=3, maxticks=14))
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M"))
    power = 2.0 ** math.ceil(math.log2(highest / 4))
    axes.yaxis.set_major_locator(MultipleLocator(power) if unit == "bytes" else MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: formatted(value, unit)))
    axes.tick_params(labelsize=6.5, length=0)
    axes.grid(color="#e4e4e4", linewidth=0.6)


def main() -> None:
    args = arguments()
    dashboard = json.loads(DASHBOARD.read_text())
    source, panels = Source(args, dashboard["templating"]["list"]), dashboard["panels"]
    num_rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure((WIDTH_PX / DPI, num_rows * ROW_PX / DPI), DPI, facecolor="#eef0f2")
    canvas = FigureCanvasAgg(figure)
    for panel in panels:
        if panel["type"] == "row":
            y = 1 - (panel["gridPos"]["y"] + 0.75) / num_rows
            figure.text(10 / WIDTH_PX, y, panel["title"], fontsize=10, fontweight="bold")
        else:
            draw(figure, panel, source)
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())
    image.convert("RGB").quantize(NUM_SHADES).save(args.png, optimize=True)


if __name__ == "__main__":
    main()
