"""The picture of ``bench accept``: accepted length, acceptance by place and calibration, a row for each temperature."""

from __future__ import annotations

from collections.abc import Mapping

Figures = Mapping[str, Mapping[str, Mapping]]
"""Label of the draft -> ``domain@temperature`` -> what ``accept.figures`` gives."""

Costs = Mapping[str, Mapping[str, "float | None"]]
"""Label of the draft -> what ``cost.cost_model`` gives."""


def save_acceptance(path: str, found: Figures, costs: Costs, gamma: int, note: str) -> None:
    """Draw ``found`` for blocks of ``gamma`` drafts; ``note`` goes below."""
    from matplotlib.figure import Figure

    first = next(iter(found.values()))
    at = sorted({where.split("@")[1] for where in first}, key=float)
    calibrated = any("ece" in values for places in found.values() for values in places.values())
    num_columns = 4 if calibrated else 3
    figure = Figure(figsize=(4.6 * num_columns, 3.6 * len(at)), layout="constrained")
    for row, temperature in zip(figure.subplots(len(at), num_columns, squeeze=False), at):
        places = [where for where in first if where.split("@")[1] == temperature]
        _bars(row[0], found, places, temperature)
        # The last one is all domains together, where there are several.
        _lines(row[1], found, places[-1], gamma, "conditional_acceptance", "kept if all before were")
        if calibrated:
            _lines(row[2], found, places[-1], gamma, "ece", "calibration error of the survival")
            _after_scaling(row[2], found, places[-1])
        _against_cost(row[-1], costs)
    figure.text(0.01, -0.01, note, fontsize=6, va="top")
    figure.savefig(path, dpi=150, bbox_inches="tight")


def _bars(axes, found: Figures, places: list[str], temperature: str) -> None:
    width = 0.8 / len(found)
    for i, (label, of_draft) in enumerate(found.items()):
        values = [of_draft[where]["accept_length"] or 0.0 for where in places]
        errors = [of_draft[where]["accept_length_error"] or 0.0 for where in places]
        at = [group + i * width for group in range(len(places))]
        bars = axes.bar(at, values, width * 0.92, yerr=errors, error_kw={"linewidth": 0.8}, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    middle = width * (len(found) - 1) / 2
    axes.set_xticks([group + middle for group in range(len(places))], [where.split("@")[0] for where in places])
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.margins(y=0.15)
    axes.set_ylabel("accepted length")
    axes.set_title(f"temperature {temperature}", fontsize=10)
    axes.legend(fontsize=7)


def _lines(axes, found: Figures, where: str, gamma: int, name: str, title: str) -> None:
    for label, of_draft in found.items():
        values = of_draft[where].get(name)
        points = [(k + 1, value) for k, value in enumerate(values or ()) if value is not None]
        if points:
            axes.plot(*zip(*points), marker="o", markersize=3, label=label)
    axes.set_xticks(range(1, gamma + 1))
    axes.set_xlabel("place in the block")
    axes.set_title(f"{where}: {title}", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def _against_cost(axes, costs: Costs) -> None:
    """alpha against c, with the speed-up beside each draft; drafting token by token pays above the line."""
    for label, cost in costs.items():
        if cost["alpha"] is not None:
            axes.plot(cost["c"], cost["alpha"], marker="o", linestyle="", label=f"{label}: {cost['speedup']:.2f} x")
    most = max([1.0, *(cost["c"] for cost in costs.values() if cost["c"] is not None)])
    axes.plot([0, most], [0, most], color="grey", linewidth=0.8)
    axes.set_xlabel("c: a draft's cost in target steps")
    axes.set_ylabel("alpha: kept if all before were")
    axes.set_title("all runs: speed-up by alpha and c", fontsize=10)
    axes.legend(fontsize=7)


def _after_scaling(axes, found: Figures, where: str) -> None:
    for label, of_draft in found.items():
        scaling = of_draft[where].get("sts")
        if scaling is not None:
            errors = scaling["ece_after"]
            axes.plot(range(1, len(errors) + 1), errors, "--", linewidth=1, label=f"{label}, other half, behind STS")
    axes.legend(fontsize=7)
