"""A sweep over rates as a picture: what the server gave at each, and how long it took."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import UsageError

from .report import PERCENTILES, TIMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = Mapping[str, Any]
FORMATS = (".png", ".svg")
_BEYOND = 1.25  # where inf is drawn, in the highest finite rate
_RATES = {"completed": "request_throughput", "good": "goodput"}
_TOKENS = {"output": "output_throughput", "prompt and output": "total_token_throughput"}


def check(file: Path) -> None:
    """UsageError where no plot can be written to the file, which is better known before a server is measured."""
    if file.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot is {file}; its name must end in {' or '.join(FORMATS)}.")
    if not file.parent.is_dir():
        raise UsageError(f"--plot is {file}, and there is no folder {file.parent}.")
    if find_spec("matplotlib") is None:
        raise UsageError(
            "matplotlib is not installed; install the extra bench for --plot: pip install 'engine[bench]'."
        )


def draw(report: Mapping[str, Any], file: Path) -> None:
    """Writes ``drawn``'s figure; needs no display. UsageError if the file cannot be written."""
    import matplotlib

    try:
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            drawn(report).savefig(file)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}.") from error


def drawn(report: Mapping[str, Any]) -> Figure:
    """Requests and tokens a second, and percentiles of each time, over the rate at which requests were sent. ``report`` is
    what ``--json`` prints."""
    from matplotlib.figure import Figure

    results = sorted(report["results"], key=lambda result: float(result["rate"]))
    figure = Figure(figsize=(13, 7), layout="constrained")
    panels = list(figure.subplots(2, 3).flat)
    for axes, title, names in ((panels[0], "requests/s", _RATES), (panels[1], "tokens/s", _TOKENS)):
        _panel(axes, title, results, {label: _figure(name) for label, name in names.items()})
    for axes, (name, what) in zip(panels[2:], TIMES.items(), strict=True):
        lines = {f"p{p}": _percentile(f"{name}_ms", f"p{p}") for p in PERCENTILES}
        _panel(axes, f"{name.upper()}: {what}, ms", results, lines)
        if (goal := results[0]["goodput_goals_ms"].get(name)) is not None:
            axes.axhline(goal, color="gray", linestyle=":", label="goal")
            axes.legend()
    figure.suptitle(f"{report['model']}: {report['num_prompts']} requests at each rate")
    return figure


def _figure(name: str) -> Callable[[Result], float]:
    return lambda result: float(result[name])


def _percentile(name: str, percentile: str) -> Callable[[Result], float]:
    """NaN, which leaves a gap, where a result has none."""
    return lambda result: float((result[name] or {}).get(percentile, "nan"))


def _panel(axes: Axes, title: str, results: Sequence[Result], lines: Mapping[str, Callable[[Result], float]]) -> None:
    places = _places([float(result["rate"]) for result in results])
    for label, value in lines.items():
        axes.plot(places, [value(result) for result in results], marker="o", label=label)
    axes.set_title(title)
    axes.set_xlabel("requests sent a second")
    axes.set_xticks(places, [str(result["rate"]) for result in results])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _places(rates: Sequence[float]) -> list[float]:
    """Where rates are on the axis: inf is beyond the highest of the others."""
    beyond = max((rate for rate in rates if rate < float("inf")), default=1.0) * _BEYOND
    return [min(rate, beyond) for rate in rates]
