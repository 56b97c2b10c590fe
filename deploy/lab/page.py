"""A comparison as one HTML file with its pictures inside, and as pictures alone."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from deploy.lab import plots, results
from deploy.lab.measures import gaps_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deploy.lab.play import Play
    from deploy.lab.results import Outcome, Results

_MAX_POINTS = 350
"""Of one cloud: the longest gaps, and of the others every n-th."""
_STYLE = (
    "body{font:14px/1.45 sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222;"
    "background:#fff}table{border-collapse:collapse;margin:1em 0;font-size:12.5px}"
    "td,th{border-bottom:1px solid #ddd;padding:3px 9px;text-align:right}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto;display:block;"
    "margin:1.2em 0}.failed{color:#a00}"
)


def as_html(found: Results, pictures: Mapping[str, str]) -> str:
    """Return the page; it loads nothing and runs nothing."""
    workload = found.workload
    configurations = "".join(
        f"<li><b>{escape(outcome.name)}</b>: {escape(outcome.configuration.what)}"
        + (f' <span class="failed">{escape(outcome.failure)}</span>' if outcome.failure else "")
        + "</li>"
        for outcome in found.outcomes
    )
    tables = [
        _table(results.HEADS["total"], results.total_rows(found)),
        _table(results.HEADS["groups"], results.group_rows(found)),
    ]
    if rows := results.beside_rows(found):
        tables.append(_table(results.HEADS["beside"], rows))
    objective = workload.objective
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(workload.title)}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{escape(workload.title)}</h1>\n<p>{escape(found.machine)}</p>\n"
        f"<p>Arrivals: {escape(workload.arrivals)}{results.scaled(found)}. Seed {found.seed}. "
        f"Every configuration may use {found.num_cores} cores. A request is good where its TTFT is "
        f"within {objective.ttft_factor:g} and its TPOT within {objective.tpot_factor:g} times "
        "what an idle cluster took; failed requests are misses.</p>\n"
        f"<ul>{configurations}</ul>\n"
        + "\n".join(pictures.values())
        + "\n".join(tables)
        + "".join(f"<p>{escape(note)}</p>" for note in results.notes(found))
        + "\n</body></html>\n"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{heads}</tr>{body}</table>"


def pictures_of(found: Results) -> dict[str, str]:
    """Return the pictures that this comparison has figures for, by name."""
    inks = {outcome.name: plots.color(i) for i, outcome in enumerate(found.outcomes)}
    measured = [outcome for outcome in found.outcomes if outcome.runs]
    pictures = {
        "latency": _latency(measured, inks),
        "waiting": _waiting(measured, inks),
        "slots": _slots(measured, inks),
        "goodput": _goodput(measured, inks),
    }
    if found.workload.watched:
        pictures["gaps"] = _gaps(found, measured, inks)
    if any(outcome.configuration.link_bytes_per_s for outcome in measured):
        pictures["bandwidth"] = _bandwidth(measured, inks)
    return {name: picture for name, picture in pictures.items() if picture}


def _latency(measured: Sequence[Outcome], inks: Mapping[str, str]) -> str:
    strips = [
        strip
        for told, name in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"))
        for outcome in measured
        if (strip := _strip(f"{told}, {outcome.name}", name, outcome.median.total,
                            inks[outcome.name]))
    ]  # fmt: skip
    title = "Latency: median (dot), p99 (bar), maximum (end of the line)"
    return plots.spreads(title, strips) if strips else ""


def _waiting(measured: Sequence[Outcome], inks: Mapping[str, str]) -> str:
    groups = dict.fromkeys(group for outcome in measured for group in outcome.median.groups)
    strips = [
        strip
        for group in groups
        for outcome in measured
        if (strip := _strip(f"{_short(group)}, {outcome.name}", "waiting",
                            outcome.median.groups.get(group, {}), inks[outcome.name]))
    ]  # fmt: skip
    title = "Waiting before the first computation: median, p99, maximum"
    return plots.spreads(title, strips) if strips else ""


def _short(group: str) -> str:
    """Leave the sizes out: they stand in the table."""
    kind, _, rest = group.partition(" (")
    return kind + rest.partition(")")[2].replace(", ", " ")


def _strip(label: str, name: str, figures: Mapping[str, float], ink: str) -> plots.Strip | None:
    if f"{name}_p50_s" not in figures:
        return None
    # What is below a tenth of a millisecond is as good as nothing, and a log axis knows no 0.
    p50_s, p99_s, max_s = (max(figures[f"{name}_{part}_s"], 1e-4) for part in ("p50", "p99", "max"))
    return plots.Strip(label=label, p50_s=p50_s, p99_s=p99_s, max_s=max_s, color=ink)


def _slots(measured: Sequence[Outcome], inks: Mapping[str, str]) -> str:
    series = []
    for outcome in measured:
        if outcome.play is not None and outcome.play.samples:
            series.append(
                plots.Series(label=outcome.name, points=_uses(outcome.play),
                             color=inks[outcome.name])
            )  # fmt: skip
    title = "Slots in use, as the control plane reports them"
    until_s = max((o.play.seconds for o in measured if o.play is not None), default=1.0)
    return plots.steps(title, series, until_s=until_s) if series else ""


def _uses(play: Play) -> list[tuple[float, float]]:
    points = [(s.at_s, s.num_used / s.num_slots) for s in play.samples if s.num_slots]
    return [*points, (play.seconds, points[-1][1])] if points else []


def _goodput(measured: Sequence[Outcome], inks: Mapping[str, str]) -> str:
    rows = [
        (
            outcome.name,
            total["good_per_s"],
            f"{total['good_per_s']:.2f}/s, {total['attainment']:.0%} of {total['sent']:.0f} sent",
            inks[outcome.name],
        )
        for outcome in measured
        if (total := outcome.median.total)
    ]
    return plots.bars("Good requests per second", rows) if rows else ""


def _gaps(found: Results, measured: Sequence[Outcome], inks: Mapping[str, str]) -> str:
    workload, series, marks, until_s = found.workload, [], [], 1.0
    for outcome in measured:
        if outcome.play is None:
            continue
        records = outcome.play.records
        streams = [record for record in records if record.ask.kind == workload.watched]
        gaps = sorted(gaps_of(streams), key=lambda gap: gap.seconds, reverse=True)
        rest = gaps[_MAX_POINTS // 2 :]
        stride = max(1, 2 * len(rest) // _MAX_POINTS)
        kept = [*gaps[: _MAX_POINTS // 2], *rest[::stride]]
        points = [(gap.began_s, max(gap.seconds, 1e-3)) for gap in kept]
        series.append(plots.Series(label=outcome.name, points=points, color=inks[outcome.name]))
        marks.append([r.sent_s for r in records if r.ask.kind == workload.disturber])
        until_s = max(until_s, outcome.play.seconds)
    title = f"Gaps of the {workload.watched}s over time; dashed: a {workload.disturber} arrives"
    return plots.clouds(title, series, until_s=until_s, marks=marks) if series else ""


def _bandwidth(measured: Sequence[Outcome], inks: Mapping[str, str]) -> str:
    slowed = [
        (rate, outcome.median.total)
        for outcome in measured
        if (rate := outcome.configuration.link_bytes_per_s) is not None
    ]
    apart = {o.configuration.deploy for o in measured if o.configuration.link_bytes_per_s}
    others = [o for o in measured if o.configuration.deploy not in apart]
    figures = (("itl_p99_s", "ITL p99"), ("e2e_p50_s", "E2E p50"))
    series = [
        plots.Series(
            label=label,
            points=[(rate, total[name]) for rate, total in slowed if name in total],
            color=plots.color(index),
        )
        for index, (name, label) in enumerate(figures)
    ]
    levels = [
        (f"{label}, {outcome.name}", outcome.median.total[name], plots.color(index))
        for index, (name, label) in enumerate(figures)
        for outcome in others
        if name in outcome.median.total
    ]
    title = "Disaggregated over slower links; dashed: colocated"
    return plots.lines(title, [s for s in series if s.points], levels=levels)
