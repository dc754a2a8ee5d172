"""The page of a search: whole, small, escaped, and in need of nothing (`test_report_browser.py` opens it)."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from megatron.planner.search import Outcome, Rejected
from megatron.planner.search import report_figures as timelines
from megatron.planner.search.notes import is_delayed, sentences_on_weights
from megatron.planner.search.outcome import Choice, Kept
from megatron.planner.search.report import configurations_table, html_report
from megatron.planner.search.table import HEADINGS, cells
from tests.planner.search.helper import PAPER, a100, gpt3, planner, priced, run

MODEL, MACHINES = gpt3(16, 7424, 58), a100(1)
TRILLION, MANY = gpt3(128, 25600, 160), a100(384)
DOCS = "file:///a%20b/docs"


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """Several schedules, some of it under pressure, and 2bw is the best."""
    found = priced(run(MODEL, MACHINES, global_batch_size=16, num_simulated=2), MODEL, MACHINES)
    assert any(each.estimate.under_pressure for each in found.kept) and len(found.best_of_schedules()) > 3
    assert found.best.choice.schedule == "2bw"
    return found


def page_of(outcome: Outcome, model=MODEL, machines=MACHINES, **options: object) -> str:
    given = {"title": "A <title>", "summary": ["one & two"], "notes": sentences_on_weights(outcome.kept), "docs": DOCS}
    return html_report(outcome, lambda _: planner(model, machines, PAPER), **given | options)


def copies(kept, count: int) -> tuple:
    return tuple(replace(each) for _ in range(count) for each in kept)


class Page(HTMLParser):
    """Tags, attributes, and the cells of each table's rows, whose end tags HTML lets out."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[tuple[str, str]] = []
        self.loads: list[str] = []
        self.tables: list[list[list[str]]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if tag == "a" and name == "href":
                self.links.append(value)
            elif name in ("src", "srcset", "href", "xlink:href", "data", "action", "poster"):
                self.loads.append(value)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        if tag in ("tbody", "thead", "table"):
            self._in_cell = False

    def handle_data(self, data):
        if self._in_cell:
            self.tables[-1][-1][-1] += data.strip("\n")


def test_the_page_needs_nothing_else(outcome):
    """Style and script stand in it; it loads nothing, and says so to the browser; ids that are used are unique."""
    text = page_of(outcome, script="#!/bin/sh\ncat <<E", num_timelines=2)
    page = Page(text)
    assert page.tags.count("svg") == 1 + 2 + 2 and page.tags.count("table") == 3  # the picture, bars, timelines
    assert page.tags.count("script") == 1 and page.tags.count("style") == 2  # one is the picture's
    assert not {"link", "img", "iframe", "image", "object", "embed", "base"} & set(page.tags)
    assert page.loads and all(each.startswith("#") for each in page.loads)
    assert not re.search(r"url\((?!#)|@import|\bfetch\(|XMLHttp|\bimport\b *[({'\"]", text)
    assert "default-src 'none'" in text.partition("<style>")[0]
    assert set(re.findall(r'https?://[^"< ]*', text)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    used = [link[1:] for link in (*page.loads, *page.links) if link.startswith("#")]
    assert used and all(page.ids.count(each) == 1 for each in used)


def test_what_users_wrote_is_escaped(outcome):
    """Titles, lines, scripts, schedules, notes and reasons are text on the page, whatever they say."""
    bad = '<script>alert("x")</script>&'
    kept = replace(outcome.best, notes=(bad,))
    rejected = Rejected(choice=Choice(tensor=1), reason=bad)
    made_up = Outcome(kept=(kept,), rejected=(rejected,))
    text = page_of(made_up, title=bad, summary=[bad], notes=[bad], script=bad, num_timelines=1)
    page = Page(text)
    assert page.tags.count("script") == 1 and "<script>alert" not in text
    assert text.count("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;&amp;") >= 8
    assert bad in page.tables[0][1][-1] and bad in page.tables[1][1][-1] and bad in page.tables[2][1][-1]


def with_shared_ranks(each: Kept) -> Kept:
    """The same in a search that asks for context parallelism, of a model with experts."""
    return replace(each, choice=replace(each.choice, context=1, expert=1))


def test_every_row_is_there(outcome):
    """One for each configuration that fits, in its order and with the terminal's words, however many they are."""
    many = Outcome(kept=copies([with_shared_ranks(each) for each in outcome.kept], 4), rejected=outcome.rejected)
    assert len(many.kept) > 300
    of_schedules, everything, _ = Page(page_of(many, num_timelines=1)).tables
    head, *rows = everything
    names = [heading.replace("\xad", "") for heading in head]
    assert names == [name for name in HEADINGS if name != "gain, %"] and len(rows) == len(many.kept)
    for rank, (each, row) in enumerate(zip(many.kept, rows, strict=True), start=1):
        rank, _, *expected, notes = cells(each, rank)
        expected.insert(0, rank)
        assert row[:-1] == expected and row[-1].endswith(notes)
        assert row[-1].startswith("delayed weights") == (each.choice.schedule in ("2bw", "2bw+balance"))
    assert [row[1] for row in of_schedules[1:]] == [each.choice.schedule for _, each in outcome.best_of_schedules()]


def test_columns_that_say_nothing_are_left_out(outcome):
    """Of stages on each rank where all have one, of ranks that share sequences or experts where none do, of notes where
    there is none, and of what nobody asked for."""
    plain = [each for each in outcome.kept if each.choice.schedule == "flush" and not each.notes][:3]
    (table,) = Page(configurations_table(outcome, list(enumerate(plain, start=1)), name="some")).tables
    assert len(plain) == 3 and {len(row) for row in table} == {len(HEADINGS) - 5}
    assert not {"gain, %", "v", "cp", "ep", "notes"} & set(table[0])
    bare = [replace(each, accuracy=None, bill=None) for each in plain]
    (other,) = Page(configurations_table(outcome, list(enumerate(bare, start=1)), name="some")).tables
    assert set(table[0]) - set(other[0]) == {"s (80%)", "days", "cost", "cost/M tokens"}


def test_what_is_to_be_expected_of_the_best_is_said(outcome):
    """That its schedule was never compared, or its interval; days and money of all tokens."""
    text = page_of(outcome, num_timelines=0)
    best = re.search('<p class="best">(.*?)</p>', text).group(1)
    assert "Its time is not validated: no published time of 2bw was compared." in best
    assert f"{outcome.best.bill.days:.3g} days" in best and " EUR" in best
    flush = tuple(each for each in outcome.kept if each.choice.schedule == "flush")
    text = page_of(replace(outcome, kept=flush, objective="memory"), num_timelines=0)
    assert re.search(
        'class="best">The smallest: <b>flush, '
        ".*With a probability of 80% it takes [0-9.]+ to [0-9.]+ s, judged by [1-9][0-9]{2} ",
        text,
    )
    assert "<h2>The smallest of each schedule</h2>" in text


@pytest.mark.full
def test_the_delay_of_the_best_is_said_and_linked(outcome):
    """One line below the best says what it means, rows point at it; documentation whose place is known is linked."""
    page = Page(page_of(outcome))
    assert f"{DOCS}/convergence.md" in page.links and page.ids.count("delay") == 1
    text = page_of(outcome)
    best, note = text.index('<p class="best">'), text.index('<p class="note" id="delay">')
    assert best < note < text.index("<h2>") and "With 2bw" in text[note : note + 60]
    delayed = sum(is_delayed(each.choice.schedule, each.estimate.configuration) for each in outcome.kept)
    assert page.links.count("#delay") > delayed > 0
    without = Page(page_of(outcome, docs=None))
    assert not [link for link in without.links if link != "#delay"]
    flush = Outcome(kept=tuple(k for k in outcome.kept if k.choice.schedule == "flush"), rejected=outcome.rejected)
    assert "delay" not in Page(page_of(flush)).ids and not Page(page_of(flush)).links


def test_nothing_that_fits_is_a_page_too(outcome):
    page = Page(page_of(Outcome(kept=(), rejected=outcome.rejected)))
    assert len(page.tables[1]) == 1 and len(page.tables[2]) > 1 and "best" not in page.ids


@pytest.mark.full
def test_the_page_of_a_large_search_is_small():
    """A trillion parameters on 3,072 GPUs, pipelines of 64 stages, and thousands of rows: below 2 MB, and it says what
    is not drawn."""
    found = run(
        TRILLION, MANY, global_batch_size=3072, tensor=(8,), pipeline=(64,), schedules=("flush", "2bw", "bpipe"),
        num_simulated=0,
    )  # fmt: skip
    chosen = [next(each for each in found.kept if each.choice.schedule == name) for name in ("2bw", "flush", "bpipe")]
    many = Outcome(kept=(*chosen, *copies(found.kept, 3000 // len(found.kept))), rejected=found.rejected)
    text = page_of(many, TRILLION, MANY, script="#!/bin/sh")
    assert text.count("<svg") == 1 + 2 + 2 and len(text.encode()) < 2_000_000
    assert len(Page(text).tables[1]) == len(many.kept) + 1 > 2_900
    captions = re.findall("<figcaption>(batches of .*?)<br>", text)
    assert len(captions) == 2 and all(
        re.search("microbatches in the steady state; the conf", each) for each in captions
    )
    assert all("not drawn: " in each and "microbatches' numbers" in each for each in captions)
    assert all("what is under the pointer" in each for each in captions)
    assert ["so its bubbles are smaller" in each for each in captions] == [False, True]


def test_a_pipeline_that_is_too_deep_is_not_drawn(outcome, monkeypatch):
    """It is said instead, with where it can be drawn."""
    monkeypatch.setattr(timelines, "_MOST_CELLS", 3)
    text = timelines.timeline_figures([("1: a <label>", outcome.best, planner(MODEL, MACHINES, PAPER))])
    assert "1: a &lt;label&gt;" in text
    assert "too many to draw here" in text and "tools/schedule.py draw" in text and "<svg" not in text


def test_timelines_share_an_axis_in_the_steady_state():
    """As wide for as many seconds each: one of each order, with 2bw, which nobody asked for, among the first. Its ranks
    compute from the left edge to the right one; those of flush fill and drain."""
    found = run(gpt3(16, 4096, 32), a100(1), global_batch_size=64, tensor=(2,), pipeline=(4,), num_simulated=1,
                schedules=("flush", "gpipe", "interleaved", "bpipe", "zb-h1", "2bw"), unasked=("2bw",))  # fmt: skip
    text = page_of(found, gpt3(16, 4096, 32), num_timelines=4)
    labels = re.findall("<figure><h3>(.*?), t=2, p=4", text)
    assert len(labels) == 4 and labels[0].startswith("1: ") and labels[-1] == "beside: 2bw"
    assert not {"bpipe", "interleaved+balance"} & {label.split()[1] for label in labels}
    drawings = re.findall('<div class="drawing">(<svg[^>]*>)', text)
    assert len(drawings) == 4
    assert len({re.search(r' width="(\d+)"', each).group(1) for each in drawings}) == 1
    assert len({re.search('data-second="([^"]+)"', each).group(1) for each in drawings}) == 1
    idle = {}
    for label, each in zip(labels, drawings, strict=True):
        left = int(re.search(r'data-left="(\d+)', each).group(1))
        rows = [[list(map(int, box.split(",")[-2:])) for box in row.split(";")]
                for row in re.search('data-rows="([^"]*)"', each).group(1).split("|")]  # fmt: skip
        assert len(rows) == 4
        idle[label.split()[1]] = max(row[0][0] - left for row in rows)
    assert idle["2bw"] <= 8 < idle["flush"]
