"""Results on disk, and the report made of them."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar, cast
from xml.etree import ElementTree

import numpy as np
import pytest

from evals.attacks.gates import evaluate
from evals.attacks.html import page
from evals.attacks.markdown import summary
from evals.attacks.model import Attack, CorpusName, Curve, Outcome, Plot, Truth, View
from evals.attacks.model import Report as Progress
from evals.attacks.publish import publish
from evals.attacks.report import Report, cell, make_report, number
from evals.attacks.results import (
    CaptureRecord,
    ConditionRecord,
    Result,
    Results,
    ResultsError,
    Settings,
    load,
    stored_outcome,
)
from evals.attacks.svg import plot_svg

HOSTILE = "<script>alert('x')</script> & \"q\" | *b* `c` [d](e)"


class Fake(Attack):
    source, assumes, measures = "source", HOSTILE, "recovered"
    corpora: ClassVar[tuple[CorpusName, ...]] = ("short",)

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]
        self.title = f"The {name} attack"  # type: ignore[misc]

    def run(self, view: View, truth: Truth, rng: np.random.Generator, progress: Progress = print) -> Outcome:
        raise NotImplementedError


ATTACKS: dict[str, Attack] = {n: Fake(n) for n in ("nn", "row-space", "bank")}


def planted(value: float = 0.98) -> Results:
    made = Results(
        settings=Settings(seed=7, prompts=4, model="tiny", model_identity="ab" * 32, versions={"numpy": "2"}),
        machine={"processors": 2},
    )
    made.conditions["c0"] = ConditionRecord(
        title="Plain", scheme="plain", parameters={}, corpora=("short",), is_control=True
    )
    made.conditions["c2"] = ConditionRecord(
        title=HOSTILE, scheme="gelo-haar", parameters={"shield_rows": 8}, corpora=("short",)
    )
    made.captures["c2", "short"] = CaptureRecord(
        captures=4, offloads=84, operand_bytes=10_000_000, seconds=1.5
    )
    curve = Curve(label=HOSTILE, x=np.linspace(0, 1, 1000), y=np.geomspace(1e-4, 1, 1000))
    plot = Plot(title=HOSTILE, x_label="<x>", y_label="y", curves=(curve,), log_y=True)
    for condition in ("c0", "c2"):
        for attack in ATTACKS:
            found = Outcome(
                attack=attack, measure="recovered", value=1.0 if condition == "c0" else 0.0, chance=0.001,
                details={"n": np.float32(3)}, notes=(HOSTILE,), plots=(plot,),
            )  # fmt: skip
            made.results[condition, attack, "short"] = Result(
                outcome=stored_outcome(found), seconds=0.5, source="cd" * 32
            )
    leak = Outcome(
        attack="row-space", measure="recovered", value=value, chance=0.001, interval=(value, value)
    )
    made.results["c2", "row-space", "short"] = Result(outcome=leak, seconds=0.5, source="cd" * 32)
    return made


def report(value: float = 0.98) -> Report:
    return make_report(planted(value), ATTACKS)


def test_results_survive_the_disk(tmp_path: Path) -> None:
    made = planted()
    absent = Outcome(attack="bank", measure="m", applicable=False, reason="nothing there")
    made.results["c2", "bank", "short"] = Result(outcome=absent, seconds=0.1, source="s")
    made.results["c2", "nn", "short"] = Result(outcome=None, seconds=0.1, source="s", error="ValueError: x")
    made.save(tmp_path, [g.as_json() for g in evaluate(made, {"nn": ("short",)})])
    read = load(tmp_path)
    assert read.settings == made.settings
    assert read.conditions == made.conditions
    assert read.captures == made.captures
    assert list(read.results) == list(made.results)
    assert read.results["c2", "row-space", "short"] == made.results["c2", "row-space", "short"]
    again = read.outcome("c2", "bank", "short")
    assert again is not None
    assert math.isnan(again.value)
    assert not again.applicable
    assert read.outcome("c2", "nn", "short") is None
    stored = cast(Outcome, read.outcome("c0", "nn", "short"))
    assert len(stored.plots[0].curves[0].x) == 257
    assert stored.plots[0].curves[0].x[-1] == 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 9}', '{"format": 1}'])
def test_damaged_results_are_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(ResultsError):
        load(tmp_path)


def test_the_first_lines_follow_from_the_gates() -> None:
    leaks = report(0.98).headlines()
    assert re.fullmatch(r"Controls on plain operands: 2 of \d passed\.", leaks[0])
    assert any(line.startswith("CONTROL gram-distance (short): NOT RUN") for line in leaks)
    (line,) = [line for line in leaks if line.startswith("c2")]
    assert "FAILS 1 of" in line
    assert "row-space (short) 0.980, chance 0.001" in line
    (line,) = [line for line in report(0.001).headlines() if line.startswith("c2")]
    # Most gates have no result here: without a leak that is no pass.
    assert "NOT JUDGED" in line
    for text in (page(report(0.98)), summary(report(0.98))):
        assert text.index("FAILS 1 of") < text.index("Matrix")


class _Tags(HTMLParser):
    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    text = page(report())
    tags = _Tags()
    tags.feed(text)
    assert not tags.open
    assert not {"script", "link", "img", "iframe"} & tags.seen
    assert all(link.startswith("#") for link in tags.links)
    assert {"table", "svg", "polyline"} <= tags.seen
    assert "url(" not in text
    assert "alert(&#x27;x&#x27;)" in text


def test_the_summary_is_well_formed_markdown() -> None:
    text = summary(report())
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table
    assert "<script" not in text.replace("\\<script", "")
    matrix = [line for line in table if line.startswith(("| attack", "| The"))]
    assert {len(re.split(r"(?<!\\)\|", line)) for line in matrix} == {6}


def test_publish_writes_both(tmp_path: Path) -> None:
    html, markdown = publish(report(), tmp_path / "new")
    assert html.read_text().startswith("<!doctype html>")
    assert markdown.read_text().startswith("# ")


@pytest.mark.parametrize(("log_x", "log_y"), [(False, False), (True, False), (False, True), (True, True)])
def test_plots_are_well_formed_and_inside(log_x: bool, log_y: bool) -> None:
    curves = (
        Curve(label=HOSTILE, x=(0.0, 1.0, 10.0, 1e4, math.nan), y=(0.0, 1e-3, 0.5, 1.0, math.inf)),
        Curve(label="one", x=(5.0,), y=(0.1,)),
        Curve(label="none", x=(), y=()),
    )
    plot = Plot(title=HOSTILE, x_label="x", y_label="y", curves=curves, log_x=log_x, log_y=log_y)
    root = ElementTree.fromstring(plot_svg(plot))  # noqa: S314 - our own
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    (line,) = root.iter("polyline")
    points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
    # What an axis cannot show is left out: the zeros on logarithmic ones, NaN and infinity on all.
    assert len(points) == (3 if log_x or log_y else 4)
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    ticks = [t for t in root.iter("text") if t.attrib.get("text-anchor") == "end"]
    assert 2 <= len(ticks) <= 8


def test_a_plot_of_one_value_and_of_nothing() -> None:
    for values in ((2.0, 2.0), (math.nan, math.nan)):
        plot = Plot(title="t", x_label="x", y_label="y", curves=(Curve(label="c", x=values, y=values),))
        ElementTree.fromstring(plot_svg(plot))  # noqa: S314 - our own


def test_cells_and_numbers() -> None:
    assert [number(v) for v in (0.0, 0.98765, 1e-5, -0.25, math.nan, 12345.0)] == [
        "0.000", "0.988", "1.00e-05", "-0.250", "–", "1.23e+04",
    ]  # fmt: skip
    assert cell(None) == ""
    assert cell(Result(outcome=None, seconds=0, source="", error="x")) == "error"
    weak = Outcome(attack="a", measure="m", value=0.1, chance=0.0, interpretable=False)
    assert cell(Result(outcome=weak, seconds=0, source="")) == "0.100 (0.000) *"
