"""Plots and tables of landed results: ``python -m benchmarks.plots`` reads ``benchmarks/results``.

Writes ``docs/images`` and prints the tables of ``docs/benchmarks.md``. Needs matplotlib. The same results give the
same files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
# Readable on a light and on a dark page.
STYLES: Mapping[str, tuple[str, str, str]] = {
    "off": ("replay off", "#8c8c8c", "o-"),
    "eager": ("replay, eager", "#e69f00", "s-"),
    "graphs": ("replay, graphs", "#0072b2", "o-"),
    "exact": ("exact, graphs", "#009e73", "^-"),
    "ideal": ("ideal", "#0072b2", ":"),
    "floor": ("floor", "#8c8c8c", ":"),
}


def label(length: int) -> str:
    return f"{length // 1024}K"


def step(result: Mapping[str, Any]) -> plt.Figure:
    """Input tokens per second over prompt length, one panel for each number of prompts."""
    counts = sorted({row["requests"] for row in result["prefills"]})
    figure, panels = plt.subplots(1, len(counts), figsize=(5.2 * len(counts), 3.8), sharey=True, squeeze=False)
    for panel, count in zip(panels[0], counts):
        rows = sorted((row for row in result["prefills"] if row["requests"] == count), key=lambda row: row["isl"])
        for name, (title, colour, line) in STYLES.items():
            points = []
            for row in rows:
                figures = row["arms"].get("graphs" if name == "ideal" else name)
                milliseconds = None if figures is None else figures.get("ideal_ms" if name == "ideal" else "ms")
                if milliseconds is not None:
                    points.append((row["isl"], count * row["isl"] / milliseconds))
            if points:
                panel.plot(*zip(*points), line, color=colour, label=title, markersize=4, linewidth=1.5)
        panel.set_xscale("log", base=2)
        panel.set_xticks([row["isl"] for row in rows], [label(row["isl"]) for row in rows])
        panel.minorticks_off()
        panel.set_xlabel("prompt tokens")
        panel.set_title(f"{count} prompt" + ("s" if count > 1 else ""), fontsize=10)
        panel.grid(alpha=0.3)
        panel.set_ylim(bottom=0)
    panels[0][0].set_ylabel("thousand input tokens per second")
    panels[0][0].legend(fontsize=8, frameon=False)
    figure.suptitle(f"Prefill of the reference model, {result['device']}, {result['date']}", fontsize=10)
    figure.tight_layout()
    return figure


def step_tables(result: Mapping[str, Any]) -> str:
    """Markdown: times and ratios of prefills; what a step runs; decodes."""

    def ratio(figures: Mapping[str, Any] | None, name: str) -> str:
        return "" if figures is None or name not in figures else f"{figures[name]:.3f}"

    lines = [
        "| prompts | tokens | off ms | eager | graphs | exact | floor | tok/s off | tok/s graphs "
        "| graphs / off | exact / off | graphs of ideal | exact of ideal |",
        "|--:" * 13 + "|",
    ]
    for row in result["prefills"]:
        arms = row["arms"]
        cells = [row["requests"], label(row["isl"])]
        cells += [
            f"{arms[name]['ms']:.1f}" if name in arms else "" for name in ("off", "eager", "graphs", "exact", "floor")
        ]
        cells += [f"{arms[name]['tokens_per_s']:,.0f}" for name in ("off", "graphs")]
        cells += [ratio(arms.get(name), "of_off") for name in ("graphs", "exact")]
        cells += [ratio(arms.get(name), "of_ideal") for name in ("graphs", "exact")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| tokens | arm | kernels | launches | device ms | host ms | peak MiB |", "|--:|---|" + "--:|" * 5]
    for row in result["prefills"]:
        for name, figures in row["arms"].items():
            if "last_step" in figures:
                last = figures["last_step"]
                cells = [label(row["isl"]), name, last["kernels"], last["launches"], f"{last['device_ms']:.1f}"]
                cells += [f"{figures['host_ms']:.1f}", f"{figures['peak_bytes'] / 2**20:.0f}"]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| requests | eager off ms | on / off | FULL graph off ms | on / off |", "|--:" * 5 + "|"]
    for row in result["decodes"]:
        cells = [str(row["requests"])]
        for mode in ("eager", "full_graph"):
            cells += [f"{row[mode]['off_ms']:.3f}", f"{row[mode]['of_off']:.4f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"step-h200.json": step_tables}
PLOTS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], plt.Figure]]] = {
    "step-prefill.svg": ("step-h200.json", step),
}


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "vllm-ascend-replay", "svg.fonttype": "none", "font.size": 9})
    for name, (source, draw) in PLOTS.items():
        if not (RESULTS / source).exists():
            continue
        figure = draw(json.loads((RESULTS / source).read_text()))
        figure.savefig(IMAGES / name, metadata={"Date": None}, facecolor="white")
        plt.close(figure)
        print(IMAGES / name)
    for source, tables in TABLES.items():
        if (RESULTS / source).exists():
            print(tables(json.loads((RESULTS / source).read_text())))


if __name__ == "__main__":
    main()
