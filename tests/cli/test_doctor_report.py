"""The page of ``crossreduce doctor --report``: its content; no text of a dump becomes HTML."""

import re
from html.parser import HTMLParser

import pytest
from histories import history, new_dump
from paths import SUPPORT

from crossreduce import __version__
from crossreduce.cli.doctor import timeline
from crossreduce.cli.doctor.timeline import CallBar, RankRow
from crossreduce.observe import flight_recorder
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
        element = {"tag": tag, "text": "", "class": "", **dict(attributes)}
        assert element.get("id") not in self.ids
        self.ids |= {element["id"]} if "id" in element else set()
        self.elements.append(element)
        self.open += [element] if tag not in VOID else []

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag, tag

    def handle_data(self, text):
        for element in self.open:
            element["text"] += text

    def find(self, tag, kind=None, **attributes):
        """Return all elements of a tag with these attributes, and with a class."""
        attributes["tag"] = tag
        found = [element for element in self.elements if attributes.items() <= element.items()]
        return [element for element in found if kind is None or kind in element["class"].split()]


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
    """The page has the command and the version, the hosts, the findings, the cause, a row per rank with its last calls,
    a table, and the stacks. The rank that is behind and the rank without information are marked."""
    found, text = page(GOLDEN)
    (about,) = found.find("p", id="about")
    assert re.fullmatch(rf"crossreduce doctor {GOLDEN} --report \S+ · crossreduce {__version__}", about["text"])
    assert [line["text"] for line in found.find("p", "dim")][2] == "hosts alpha, beta"
    report = crossreduce("doctor", GOLDEN)[1].splitlines()
    assert [item["text"] for item in found.find("li")][:3] == report[1:4]
    assert found.find("pre")[0]["text"].splitlines() == report[5:7]
    rows = {row["id"]: row for row in found.find("div", "row") if "id" in row}
    assert list(rows) == [f"g0r{rank}" for rank in (0, 1, 3, 2, 4, 5)]  # host after host
    assert [row for row in rows if "blamed" in rows[row]["class"].split()] == ["g0r3", "g0r5"]
    assert "no dump describes this rank" in rows["g0r5"]["text"]
    hung = found.find("b", "hung")
    assert [bar["id"] for bar in hung] == ["g0r0o17", "g0r1o17", "g0r2o17", "g0r4o17"]
    for bar, seconds in zip(hung, ("30.25", "30.05", "30", "29.9"), strict=True):
        assert "all_reduce sum float32[1024, 3]: began at " in bar["aria-label"]
        assert f", had not ended after {seconds} s, of which it waited " in bar["aria-label"]
    assert found.find("tr")[4]["text"] == "3alpha4003finished30.75 s16barrierno"  # the cells of rank 3, joined
    assert [each["text"] for each in found.find("summary")] == ["ranks 0-2: 2 threads", "rank 4: 2 threads"]
    assert "step (/home/someone/train.py:41)" in text


def test_the_page_is_complete_and_accessible(page):
    """The page works without a network: it refers to nothing outside of it. Each rank has a list box with a name, which
    the keyboard reaches. Each call is an option of it with a label. A status announces the selected call."""
    found, text = page(GOLDEN)
    policy = found.find("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    assert not re.search(r"https?://|url\(|@import|\bsrc=|fetch\(|XMLHttp", text)
    targets = {element["href"] for element in found.elements if "href" in element} - {"data:,"}
    assert targets == {f"#g0r{rank}" for rank in range(6)}
    assert {target.removeprefix("#") for target in targets} <= found.ids
    boxes = found.find("div", role="listbox", tabindex="0")
    assert boxes == found.find("div", role="listbox")
    assert boxes[2]["aria-label"] == "rank 3: 4 calls; the last one is finished"
    assert all(bar["role"] == "option" and bar["aria-label"] and bar["id"] for bar in found.find("b"))
    assert found.find("div", role="status")[0]["aria-live"] == "polite"
    assert [button.get("aria-label") or button["text"] for button in found.find("button", type="button")] == [
        "zoom out", "zoom in", "show everything", "only ranks that are behind or unknown",
    ]  # fmt: skip
    assert found.find("html", lang="en")


HOSTILE = '</pre></script><script>alert("1")</script><img src=x onerror=alert(2)>\'&amp;'


def test_texts_of_dumps_are_escaped(page, dump_directory):
    """Texts in dumps, such as names of groups, errors and lines of code, cannot add elements to the page."""
    ops = (Op(1, HOSTILE, 1.0, 1.5), Op(2, HOSTILE, 2.0, None))
    threads = (Thread(HOSTILE, (Frame(HOSTILE, 3, HOSTILE, HOSTILE),)),)
    texts = {"cause": HOSTILE, "hostname": HOSTILE, "threads": threads, "versions": {HOSTILE: HOSTILE}, "now_s": 5.0}
    for rank in range(2):
        dump = new_dump(rank, History(0, ops, 1), History(1, ops[:1], 2), hosts=((0, 1),), group=HOSTILE)
        flight_recorder.write(dump._replace(**texts))
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
    """A page about 300 ranks has a row for each, and a button that shows only ranks that are behind. The bars of a rank
    are in order, and within the time line."""
    ranks = tuple(range(300))
    histories = [history(rank, 99 if rank == 200 else 100) for rank in ranks]
    for rank in (*ranks[:200], *ranks[201:]):
        flight_recorder.write(new_dump(rank, histories[rank], histories[200], hosts=(ranks,)))
    found, text = page(dump_directory)
    assert len([row for row in found.find("div", "row") if "id" in row]) == 300
    assert [row["id"] for row in found.find("div", "blamed")] == ["g0r200"]
    assert len(found.find("button", "filter")) == 1
    assert len(text) < 4 << 20
    bars = found.find("b")
    assert [bar["id"].partition("o")[0] for bar in bars] == [f"g0r{rank}" for rank in ranks for _ in range(32)]
    lefts = [float(re.match(r"left:([\d.e+-]+)%;width:", bar["style"])[1]) for bar in bars]
    for first in range(0, len(bars), 32):
        places = [0, *lefts[first : first + 32], 100]
        assert places == sorted(places)


def test_several_groups_and_unreadable_files(crossreduce, tmp_path, dump_directory):
    """Each broken group has a section, even if UTF-8 cannot encode its name. Files that cannot be read are listed."""
    for group in ("one", "two\udc80"):
        flight_recorder.write(new_dump(0, history(0, 3), hosts=((0,),), group=group))
    (dump_directory / "rank7.json").write_text("<b>")
    file = tmp_path / "report.html"
    code, _, error = crossreduce("doctor", dump_directory, "--report", file)
    assert (code, "rank7.json cannot be read" in error) == (0, True)
    found = Page(file.read_text())
    heads = [each["text"] for each in found.find("h2")]
    assert heads == ['Group "one"', 'Group "two?"', "Files that could not be read"]
    assert found.find("li")[-1]["text"].startswith("rank7.json cannot be read: it is not JSON")


def test_the_report_is_written_completely_or_not_at_all(crossreduce, tmp_path):
    """Without a readable dump, an existing report is not changed. A file that cannot be written is an error."""
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
    """A rank waits until the last rank of its host has begun the call, or, if one has not, until the group broke.
    Calls that began after the group broke, and the mark of a rank that left, are left out."""
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
    """Hosts are aligned by the calendar times in their dumps. Times with more digits make the error smaller."""
    hosts = ((0, 1), (2,))
    one, two = History(0, (Op(1, "a", 99.0, None),)), History(2, (Op(1, "a", 4999.5, None),))
    dumps = [
        dump_of(0, 100.0, "2026-01-02 03:04:05.250000+0000", hosts, one),
        dump_of(1, 100.5, "2026-01-02 05:04:05.750001+0200", hosts, History(1, ())),
        dump_of(2, 5000.0, "2026-01-02 03:04:05+0000", hosts, two),
    ]
    for time, uncertainty_s in ((dumps[2].time, 0.5), ("2026-01-02 03:04:05.500000+0000", 5e-7), ("", float("inf"))):
        found = timeline.timeline([*dumps[:2], dumps[2]._replace(time=time)])
        assert [row.rank for row in found.rows] == [0, 1, 2]
        assert found.uncertainty_s == pytest.approx(uncertainty_s, abs=1e-6)
        begins = [found.rows[rank].bars[0].begin_s for rank in (0, 2)]
        if time:
            assert begins == pytest.approx([4.25 - 5.25, 5.0 - 5.25], abs=1e-5)  # the first abort: at 03:04:05.25
