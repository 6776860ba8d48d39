"""Pictures of the task ablation."""

from __future__ import annotations

from matplotlib.figure import Figure

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.result import MethodDict, Result
from hf_specdec.bench.reports.pictures.drawing import BY_KIND, caption, new_figure, of_intervals, ratio_panel
from hf_specdec.bench.reports.pictures.gains import HOLLOW
from hf_specdec.bench.reports.tables.ablation import base_of, short_title


def ablation_gains(result: Result) -> Figure:
    """The speedup of each combination over the first row (everything off), and of drafting within each; sorted."""
    first = result["methods"][0]["name"]
    gains = {m["name"]: speed.speedup(result, m["name"], first) for m in result["methods"][1:]}
    shown = sorted((m for m in result["methods"][1:] if gains[m["name"]]), key=lambda m: -_value(gains[m["name"]]))
    figure, panels = new_figure(1.4 + 0.42 * len(shown), columns=2, sharey=True, explain=shown)
    bases = {m["name"]: base for m in shown if (base := base_of(result, m, "none"))}
    drafting = {name: speed.speedup(result, name, base) for name, base in bases.items()}
    for axes, found, title in zip(panels, (gains, drafting), ("all switched off", "plain, same switches"), strict=True):
        ratio_panel(axes, [(_name(m), found.get(m["name"]), BY_KIND[m["kind"]]) for m in shown])
        axes.tick_params(axis="y", labelsize="small")
        axes.set_xlabel(f"Speedup over\n{title} (×)", fontsize="small")
    figure.suptitle("Speculative decoding, KV cache and Better Transformer")
    caption(figure, of_intervals(result, HOLLOW))
    return figure


def _value(found: speed.Ratio | None) -> float:
    return 0.0 if found is None else found.value


def _name(method: MethodDict) -> str:
    parts = {"cache": "KV cache", "better_transformer": "Better Transformer"}
    return " + ".join([short_title(method), *(words for switch, words in parts.items() if method[switch])])
