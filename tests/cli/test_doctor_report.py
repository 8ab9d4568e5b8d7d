"""The page of ``crossreduce doctor --report``: its content; no text of a dump becomes HTML."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from browser import chromium, require_browser
from histories import history, new_dump
from paths import SUPPORT

from crossreduce.cli.doctor import timeline
from crossreduce.cli.doctor.diagnosis import diagnose
from crossreduce.cli.doctor.timeline import CallBar, RankRow
from crossreduce.observe import flight_recorder
from crossreduce.observe.diagnostics import CallSignature, timeout_text
from crossreduce.observe.flight_recorder import Frame, History, Op, Thread
from crossreduce.observe.liveness import LEFT

GOLDEN = SUPPORT / "dumps"
VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """A parsed page: its elements with their attributes and texts; unbalanced tags raise an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.ids = [], [], set()
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        element = {"tag": tag, "text": "", **attributes}
        self.elements.append(element)
        if "id" in attributes:
            assert attributes["id"] not in self.ids, attributes["id"]
            self.ids.add(attributes["id"])
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag, tag

    def handle_data(self, text):
        for element in self.open:
            element["text"] += text

    def find(self, tag, **attributes):
        """Return all elements of a tag with these attributes; ``class_`` is one of the element's classes."""
        kind = attributes.pop("class_", None)
        return [
            element
            for element in self.elements
            if element["tag"] == tag
            and all(element.get(name) == value for name, value in attributes.items())
            and (kind is None or kind in (element.get("class") or "").split())
        ]


@pytest.fixture
def page(crossreduce, tmp_path):
    """Return a function that writes the report on a directory of dumps and returns it, parsed, and its text."""

    def written(directory):
        file = tmp_path / "report.html"
        code, _, error = crossreduce("doctor", directory, "--report", file)
        assert (code, error) == (0, "")
        text = file.read_text("utf-8")
        return Page(text), text

    return written


def test_the_page_on_a_broken_group(page, crossreduce):
    """The page has the findings, the cause, a row per rank with its last calls, a table, and the stacks; the rank that
    is behind and the one without information are marked."""
    found, text = page(GOLDEN)
    report = crossreduce("doctor", GOLDEN)[1].splitlines()
    assert [item["text"] for item in found.find("li")][:3] == report[1:4]
    assert found.find("pre")[0]["text"].splitlines() == report[5:7]
    rows = {row["id"]: row for row in found.find("div", class_="row") if "id" in row}
    assert list(rows) == [f"g0r{rank}" for rank in (0, 1, 3, 2, 4, 5)]  # host after host
    assert [row for row in rows if "blamed" in rows[row]["class"].split()] == ["g0r3", "g0r5"]
    assert "no dump describes this rank" in rows["g0r5"]["text"]
    hung = found.find("b", class_="hung")
    assert [bar["id"] for bar in hung] == ["g0r0o17", "g0r1o17", "g0r2o17", "g0r4o17"]
    assert all("all_reduce sum float32[1024, 3]: began at " in bar["aria-label"] for bar in hung)
    due = re.compile(r", had not ended after (30|30\.25|30\.05|29\.9) s, of which it waited ")
    assert all(due.search(bar["aria-label"]) for bar in hung)
    cells = [row["text"] for row in found.find("tr")]
    assert cells[4] == "3alpha4003finished30.75 s16barrierno"
    assert [each["text"] for each in found.find("summary")] == ["ranks 0-2: 2 threads", "rank 4: 2 threads"]
    assert "step (/home/someone/train.py:41)" in text
    assert len(found.find("button")) == 4


def caused(text):
    """Return a dump of one rank of three, whose cause is this text, with a time in microseconds."""
    first = new_dump(0, *(history(rank, 3 if rank else 4) for rank in range(3)), hosts=((0, 1, 2),))
    return first._replace(cause=text, time="2026-11-26 19:52:41.123456+0000")


def test_the_advice_to_run_the_doctor_is_left_out(page, crossreduce, dump_directory):
    """Neither the command nor its page says "try: crossreduce doctor", and both print times to the second; the JSON and
    the dump have everything. Other advice stays."""
    late = {1: CallSignature(3, "barrier"), 2: CallSignature(3, "barrier")}
    dump = caused(timeout_text(6, CallSignature(4, "barrier"), late, "world"))
    flight_recorder.write(dump)
    _, out, _ = crossreduce("doctor", dump_directory)
    title = "3 ranks on 1 host, 2026-11-26 19:52:41+0000"
    assert out.splitlines()[0] == f'Group "world", {title}'
    found, text = page(dump_directory)
    assert found.find("p", class_="dim")[0]["text"] == title
    for shown in (out, text):
        assert "  given: ranks 1, 2 have not begun it: their last calls were op 3, barrier" in shown
        assert not re.search(r"\btry: ", shown)
    (incident,) = json.loads(crossreduce("doctor", dump_directory, "--json")[1])["incidents"]
    assert (incident["cause"], incident["time"]) == (dump.cause, "2026-11-26 19:52:41.123456+0000")
    alone = diagnose([dump._replace(hosts=((0,),), histories=dump.histories[:1])])
    assert alone.about == "1 rank on 1 host, 2026-11-26 19:52:41+0000"
    flight_recorder.write(caused("it broke.\n  try:   read the traceback of rank 1"))
    assert "  try:   read the traceback of rank 1" in crossreduce("doctor", dump_directory)[1]


def test_the_page_in_a_narrow_browser(page, tmp_path, dump_directory):
    """At a width of 400 pixels, no cell of the table has a line break, the page itself does not scroll sideways, and
    the line at the moment of the abort is beside the last call, inside of the time line."""
    require_browser()
    flight_recorder.write(caused("why"))
    page(dump_directory)
    with chromium(tmp_path / "profile", 400, 800) as driver:
        driver.get((tmp_path / "report.html").as_uri())
        tall = "const tall = cell => { const made = document.createRange(); made.selectNodeContents(cell);"
        tall += "return new Set([...made.getClientRects()].map(one => Math.round(one.top))).size > 1 };"
        assert driver.execute_script(f"{tall} return [...document.querySelectorAll('th,td')].filter(tall).length") == 0
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 400
        places = driver.execute_script(
            "const lines = document.querySelector('.lines'); lines.scrollLeft = 1e6;"
            "const at = one => one.getBoundingClientRect(), last = document.getElementById('g0r0o4');"
            "return [at(last).right, at(last.parentElement.querySelector('.abort')).left,"
            "at(last.parentElement.querySelector('.abort')).right, at(lines).left + lines.clientWidth]"
        )
        assert places == sorted(places)
        assert places[2] - places[1] >= 3
        assert places[3] - places[2] >= 5


def test_the_page_is_complete_and_accessible(page):
    """The page refers to nothing outside of it, and forbids requests, so it works without a network. Rows are list
    boxes with names, which the keyboard reaches; calls are options with names; a status announces the selected call."""
    found, text = page(GOLDEN)
    policy = found.find("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    assert not re.search(r"https?://|url\(|@import|\bsrc=|fetch\(|XMLHttp", text)
    targets = {element["href"] for element in found.elements if "href" in element} - {"data:,"}
    assert targets == {f"#g0r{rank}" for rank in range(6)}
    assert {target.removeprefix("#") for target in targets} <= found.ids
    boxes = found.find("div", role="listbox")
    assert [box["aria-label"] for box in boxes][2] == "rank 3: 4 calls; the last one is finished"
    assert all(box["tabindex"] == "0" for box in boxes)
    assert all(bar["role"] == "option" and bar["aria-label"] and bar["id"] for bar in found.find("b"))
    assert found.find("div", role="status")[0]["aria-live"] == "polite"
    assert [button.get("aria-label") or button["text"] for button in found.find("button", type="button")] == [
        "zoom out", "zoom in", "show everything", "only ranks that are behind or unknown",
    ]  # fmt: skip
    assert found.find("html")[0]["lang"] == "en"


HOSTILE = '</pre></script><script>alert("1")</script><img src=x onerror=alert(2)>\'&amp;'


def test_texts_of_dumps_are_escaped(page, dump_directory):
    """Names of groups, descriptions of calls, errors, host names, threads, code and versions cannot add elements."""
    ops = (Op(1, HOSTILE, 1.0, 1.5), Op(2, HOSTILE, 2.0, None))
    for rank in range(2):
        dump = new_dump(rank, History(0, ops, 1), History(1, ops[:1], 2), hosts=((0, 1),), group=HOSTILE)
        stack = (Frame(HOSTILE, 3, HOSTILE, HOSTILE),)
        threads = (Thread(HOSTILE, stack),)
        flight_recorder.write(
            dump._replace(cause=HOSTILE, hostname=HOSTILE, threads=threads, versions={HOSTILE: HOSTILE}, now_s=5.0)
        )
    found, text = page(dump_directory)
    assert (len(found.find("script")), len(found.find("img"))) == (1, 0)
    assert "alert(" not in found.find("script")[0]["text"]
    assert not [name for element in found.elements for name in element if name.startswith("on")]
    assert found.find("h2")[0]["text"] == f'Group "{HOSTILE}"'
    assert found.find("pre")[0]["text"] == HOSTILE
    assert all(HOSTILE in bar["aria-label"] for bar in found.find("b"))
    assert HOSTILE in found.find("details")[0]["text"]
    assert HOSTILE not in text


def test_hundreds_of_ranks(page, dump_directory):
    """A page of 300 ranks has a row for each, and can show only those that are behind. The bars of a rank follow each
    other, inside of the time line, and do not overlap."""
    ranks = tuple(range(300))
    histories = [history(rank, 99 if rank == 200 else 100) for rank in ranks]
    for rank in ranks:
        if rank != 200:
            flight_recorder.write(new_dump(rank, *histories[rank : rank + 1], *histories[200:201], hosts=(ranks,)))
    found, text = page(dump_directory)
    assert len([row for row in found.find("div", class_="row") if "id" in row]) == 300
    assert [row["id"] for row in found.find("div", class_="blamed")] == ["g0r200"]
    assert len(found.find("button", class_="filter")) == 1
    assert len(text) < 4 << 20
    bars = found.find("b")
    assert [bar["id"].partition("o")[0] for bar in bars] == [f"g0r{rank}" for rank in ranks for _ in range(32)]
    places = [re.fullmatch(r"left:([\d.e+-]+)%;width:([\d.e+-]+)%", bar["style"]).groups() for bar in bars]
    spans = [(float(left), float(left) + float(width)) for left, width in places]
    assert all(0 <= begin <= end <= 100.001 for begin, end in spans)
    for first in range(0, len(spans), 32):
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(spans[first : first + 32]))


def test_several_groups_and_unreadable_files(crossreduce, tmp_path, dump_directory):
    """Each broken group has a section, also if UTF-8 cannot write its name; files that cannot be read are listed."""
    for group in ("one", "two\udc80"):
        flight_recorder.write(new_dump(0, history(0, 3), hosts=((0,),), group=group))
    (dump_directory / "rank7.json").write_text("<b>")
    file = tmp_path / "report.html"
    code, _, error = crossreduce("doctor", dump_directory, "--report", file)
    found = Page(file.read_text())
    assert code == 0
    assert "rank7.json cannot be read" in error
    heads = [each["text"] for each in found.find("h2")]
    assert heads == ['Group "one"', 'Group "two?"', "Files that could not be read"]
    assert found.find("li")[-1]["text"].startswith("rank7.json cannot be read: it is not JSON")
    assert found.find("b")[0]["id"] != found.find("b")[-1]["id"]


def test_the_report_is_written_completely_or_not_at_all(crossreduce, tmp_path):
    """Without a readable dump an existing report stays; a file that cannot be written is refused before the work."""
    file = tmp_path / "report.html"
    file.write_text("before")
    (tmp_path / "empty").mkdir()
    assert crossreduce("doctor", tmp_path / "empty", "--report", file)[0] == 1
    code, out, error = crossreduce("doctor", GOLDEN, "--report", tmp_path / "missing" / "report.html")
    assert (code, out, file.read_text()) == (2, "", "before")
    assert "--report" in error
    assert "there is no folder" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "report.html"]


def dump_of(rank, now_s, time, hosts, *histories):
    return new_dump(rank, *histories, hosts=hosts)._replace(now_s=now_s, time=time)


def test_waits_of_a_host():
    """A rank waits from its begin until the last rank of its host has begun the call; if one has not begun it, until
    the group broke. Calls that began after that are left out, and so is the mark of a rank that left."""
    calls = {
        0: (Op(1, "a", 10.0, 13.0), Op(2, "b", 14.0, None)),
        1: (Op(1, "a", 12.0, 13.0), Op(2, "b", 15.0, 21.0), Op(3, LEFT, 16.0, None)),
        2: (Op(1, "a", 11.0, 13.5), Op(2, "b", 21.0, None)),
    }
    histories = [History(rank, ops) for rank, ops in calls.items()]
    dumps = [dump_of(rank, 20.0 + rank, "?", ((0, 1, 2),), *histories) for rank in (0, 1)]
    found = timeline.timeline(dumps)
    assert found.uncertainty_s is None
    assert found.rows == (
        RankRow(0, 0, (CallBar(1, "a", -10.0, -7.0, 2.0, True), CallBar(2, "b", -6.0, 0.0, 6.0, False))),
        RankRow(1, 0, (CallBar(1, "a", -8.0, -7.0, 0.0, True), CallBar(2, "b", -5.0, 0.0, 5.0, False))),
        RankRow(2, 0, (CallBar(1, "a", -9.0, -6.5, 1.0, True),)),
    )


def test_hosts_are_aligned_by_the_calendar():
    """Hosts whose clocks began at other times are aligned by the calendar; the dumps of a host narrow the error."""
    hosts = ((0, 1), (2,))
    one, two = History(0, (Op(1, "a", 99.0, None),)), History(2, (Op(1, "a", 4999.5, None),))
    dumps = [
        dump_of(0, 100.0, "2026-01-02 03:04:05.250000+0000", hosts, one),
        dump_of(1, 100.5, "2026-01-02 05:04:05.750001+0200", hosts, History(1, ())),
        dump_of(2, 5000.0, "2026-01-02 03:04:05+0000", hosts, two),
    ]
    found = timeline.timeline(dumps)
    assert found.uncertainty_s == 0.5
    assert [row.rank for row in found.rows] == [0, 1, 2]
    begin = found.rows[0].bars[0].begin_s
    assert begin == pytest.approx(-1.0, abs=1e-5)
    assert found.rows[2].bars[0].begin_s - begin == pytest.approx(4999.5 - 5000 + 5.5 - (99 - 100 + 5.25), abs=1e-5)
    exact = [dump._replace(time="2026-01-02 03:04:05.500000+0000") if dump.rank == 2 else dump for dump in dumps]
    assert timeline.timeline(exact).uncertainty_s == pytest.approx(5e-7, abs=1e-6)
    unknown = [dump._replace(time="yesterday") for dump in dumps]
    assert timeline.timeline(unknown).uncertainty_s == float("inf")
    (_, error), (_, again) = (timeline._offset([new_dump(0, history(0, 0), hosts=((0,),))]) for _ in range(2))
    assert error == again == pytest.approx(5e-7, rel=0.1)  # new dumps have microseconds


def test_long_pauses_are_shortened():
    """A pause that is longer than everything else is shortened and marked; order and the other proportions stay. Groups
    that made no call, or one, have an axis, too."""
    bars = [CallBar(k, "a", float(k), k + 0.5, 0.0, True) for k in range(-140, -100)]
    axis = timeline._axis([*bars, CallBar(1, "a", -100.0, 0.0, 0.0, False)])
    (pause,) = axis.pauses
    assert pause.seconds == 100
    assert 0.2 < pause.end - pause.begin < 0.3
    assert (axis.place(-140), axis.place(0.0)) == (0.0, 1.0)
    assert axis.place(-130) - axis.place(-135) == pytest.approx(axis.place(-110) - axis.place(-115))
    for place in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert axis.place(axis.time(place)) == pytest.approx(place)
    even = timeline._axis([CallBar(k, "a", float(k), k + 1.0, 0.0, True) for k in range(-10, 0)])
    assert even.pauses == ()
    assert even.place(-5.0) == pytest.approx(0.5)
    for few in ([], [CallBar(1, "a", 0.0, 0.0, 0.0, False)], [CallBar(1, "a", -1e-9, 0.0, 0.0, True)]):
        assert (timeline._axis(few).place(-1e9), timeline._axis(few).place(0.0)) == (0.0, 1.0)
