"""What slices cost: list prices of chips, or the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .report import Report
from .topology import GENERATIONS, parse

# US dollars a chip-hour, on demand, US regions, as https://cloud.google.com/tpu/pricing had them in 2025. v7x is not in
# it. docs/aot.md says the same: change both.
LIST = {"v4": 3.22, "v5e": 1.20, "v5p": 4.20, "v6e": 2.70}
LIST_DATE = "2025"


@dataclass(frozen=True)
class Cost:
    """Of one program on one slice.

    Attributes:
        hour: US dollars an hour.
        million: US dollars for a million tokens, at least: at the estimated least time of a step. None where the report
            has no rate.
    """

    hour: float
    million: float | None


def given(texts: Sequence[str]) -> dict[str, float]:
    """Prices of the list, changed by "v5e=1.2" or "v5e=1.2,v6e=2".

    Raises:
        ValueError: it is no such thing.
    """
    found = dict(LIST)
    for each in ",".join(texts).split(","):
        if not each:
            continue
        name, _, value = each.partition("=")
        try:
            price = float(value)
        except ValueError:
            price = -1.0
        if name not in GENERATIONS or not 0 <= price < float("inf"):
            raise ValueError(f"--price {each}: give a generation ({', '.join(GENERATIONS)}) and US dollars a "
                             "chip-hour, as in --price v5e=1.2")
        found[name] = price
    return found


def cost(report: Report, prices: Mapping[str, float]) -> Cost | None:
    """None where the generation has no price."""
    chips = parse(report.topology)
    if chips.chip.name not in prices:
        return None
    hour = prices[chips.chip.name] * chips.devices / chips.chip.devices
    return Cost(hour, hour / 3600 / report.tokens_s * 1e6 if report.tokens_s else None)


def summary(reports: Sequence[Report], prices: Mapping[str, float]) -> list[str]:
    """A table, the cheapest slice on which every program fits, and the cheapest for a token of each program."""
    costs = {id(each): cost(each, prices) for each in reports}
    lines = [f"{'program':<8}  {'topology':<8}  {'fits':<4}  {'$ an hour':>10}  {'$ a million tokens, at least':>28}"]
    for each in reports:
        found = costs[id(each)]
        lines.append(f"{kind(each):<8}  {each.topology:<8}  {'yes' if each.fits else 'NO':<4}  " + (
            "no list price; give --price" if found is None else f"{found.hour:>10.2f}  " +
            (f"{found.million:>28.4g}" if found.million is not None else f"{'-':>28}")))
    names = dict.fromkeys(each.topology for each in reports)
    fitting = {name: found.hour for name in names
               if all(each.fits for each in reports if each.topology == name)
               and (found := next(costs[id(each)] for each in reports if each.topology == name)) is not None}
    if fitting:
        name = min(fitting, key=fitting.__getitem__)
        lines.append(f"\nthe cheapest that fits: {name}, {fitting[name]:.2f} $ an hour")
    else:
        lines.append("\nnone of these fits" + ("" if all(costs.values()) else ", or has a price"))
    for program in dict.fromkeys(map(kind, reports)):
        priced = [(found.million, each.topology) for each in reports if kind(each) == program and each.fits
                  and (found := costs[id(each)]) is not None and found.million is not None]
        if len(priced) > 1:
            lines.append(f"the cheapest for {program}: {min(priced)[1]}, {min(priced)[0]:.4g} $ a million tokens")
    return lines


def kind(report: Report) -> str:
    """"decode" of "Qwen3ForCausalLM decode"."""
    return report.name.rpartition(" ")[2]
