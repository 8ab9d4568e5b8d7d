"""The plan explorer in a real browser: what a reader sees and does."""

import re

import pytest
from browser import chromium, prefer, require_browser, resize, wait, wait_until_ready
from reports import explained

import crossreduce as cr
from crossreduce import Topology
from crossreduce.export.explorer import Beside, report_html
from crossreduce.export.explorer import model as models
from crossreduce.planning.explain import duration
from crossreduce.planning.optimal.bounds.tight_cuts import limited_by
from crossreduce.topology.measurements import Measurement

HOME, END, ESCAPE, LEFT, RIGHT, DOWN, ENTER = "\ue011", "\ue010", "\ue00c", "\ue012", "\ue014", "\ue015", "\ue007"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Return a driver of one browser for all tests of this file."""
    require_browser()
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


LONG = "switch" * 50  # the name of a switch
PLANS = {
    8: lambda: cr.plan("dgx-1v", nbytes="64M"),
    5: lambda: cr.plan(Topology.machine("dgx-1v").subset([0, 1, 2, 4, 6]), nbytes="256M"),
    16: lambda: cr.plan(Topology.machine("hgx-h100", 2), nbytes="16M"),
    72: lambda: cr.plan("gb200-nvl72", nbytes="64M"),
    3: lambda: cr.plan(
        Topology(
            [f"cuda:{k}" for k in range(3)],
            [ends for k in range(3) for ends in ((f"cuda:{k}", LONG, 25), (LONG, f"cuda:{k}", 25))],
            [LONG],
        )
    ),
}
OTHER = cr.plan(Topology.machine("mi300x"), nbytes="64M")
MEASURED = (Measurement("all_reduce", 1 << 26, 900e-6, tuple(f"cuda:{k}" for k in range(8))),)
BESIDE = {8.5: (8, Beside(OTHER, "mi300x", MEASURED, "dgx-1v", "crossreduce export ..."))}  # with another topology


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return a function that returns the plan for some devices, and the path of its page, which is written once."""
    made = {}

    def write(devices):
        if devices not in made:
            count, beside = BESIDE.get(devices, (devices, Beside()))
            plan, path = PLANS[count](), tmp_path_factory.mktemp("reports") / f"{devices}.html"
            path.write_text(report_html(plan, beside=beside), "utf-8")
            made[devices] = plan, path
        return made[devices]

    return write


@pytest.fixture
def shown(driver, report):
    """Return a function that opens the page of a plan and returns the plan. At the end, the browser has no errors."""
    prefer(driver, "light")

    def open_page(devices, width=1280, height=1000):
        resize(driver, width, height)
        plan, path = report(devices)
        driver.get(path.as_uri())
        wait_until_ready(driver)
        return plan

    yield open_page
    assert [entry["message"] for entry in driver.get_log("browser")] == []


def text(driver, selector):
    return texts(driver, selector)[0]


def texts(driver, selector):
    code = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    return driver.execute_script(code, selector)


def find(driver, selector):
    return driver.find_element("css selector", selector)


def at(driver, thousandths):
    """Move the slider."""
    enter(driver, "time", "input", thousandths)


def enter(driver, name, event, value):
    """Give a control a value."""
    code = "const [name, event, value] = arguments, e = document.getElementById(name); e.value = value;"
    driver.execute_script(code + "e.dispatchEvent(new Event(event))", name, event, value)


def point(driver, x, y):
    """Move the pointer to a position in the window."""
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    actions = ActionBuilder(driver)
    actions.pointer_action.move_to_location(round(x), int(y))
    actions.perform()


def picture(driver):
    """Return the picture of the links' use, as text."""
    return driver.execute_script("return document.querySelector('.view canvas').toDataURL()")


def focus(driver, selector):
    driver.execute_script("document.querySelector(arguments[0]).focus()", selector)


def press(driver, *keys):
    from selenium.webdriver import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


@pytest.mark.parametrize("devices", [5, 16])
def test_pages_open_from_disk_and_show_the_numbers_of_explain(driver, shown, devices):
    """A page opens without an error and requests nothing, and its policy forbids scripts to request anything. The
    facts, the table of plans and the text are those of ``explain``."""
    plan = shown(devices)
    at(driver, 420)
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    code = "const done = arguments[0]; fetch('data:text/plain,x').then(() => done('fetched'), (e) => done(String(e)))"
    assert "Failed to fetch" in driver.execute_async_script(code)
    refused = [entry["message"] for entry in driver.get_log("browser")]
    assert len(refused) in (1, 2)  # the policy's refusal, and perhaps the failed request as well
    assert all("Content Security Policy" in message or "data:text/plain" in message for message in refused)
    head, facts, _, others = explained(plan.explain())
    assert text(driver, "h1") == head
    assert dict(zip(texts(driver, "#facts dt"), texts(driver, "#facts dd"), strict=True)).items() <= facts.items()
    assert len(texts(driver, "#facts dt")) == 5
    assert text(driver, "#explanation pre") == plan.explain()
    names, times, more = (texts(driver, f"#plans .{part}") for part in ("name", "time", "more"))
    assert (names[0], times[0]) == (f"{plan.algorithm} (this plan)", duration(plan.seconds))
    bus = plan.algbw * 2 * (devices - 1) / devices
    assert more[0].startswith(f"{bus:.2f} GB/s busbw, ")
    for name, *shown_facts in zip(names[1:], times[1:], more[1:], strict=True):
        if name.startswith("without "):
            continue
        due = others[name]
        facts_of_name = re.sub(r"[\d.]+ GB/s busbw, ", "", shown_facts.pop())
        assert shown_facts == [due[0]]
        assert facts_of_name == f"{due[1]} x, {due[2]} GB/s when large, {due[3]} % of the bound"
    assert facts["limited by"] in text(driver, "#cut-text")


def test_the_table_of_links(driver, shown):
    """The table of all links has the bytes, busy shares and transfers of the simulation."""
    plan = shown(5)
    find(driver, "#all-links summary").click()
    rows = wait(lambda: texts(driver, "#links tbody tr th"))
    cells = texts(driver, "#links tbody td")
    assert rows == [f"{link.src} → {link.dst}" for link in plan.topology.links]
    for k, link in enumerate(plan.topology.links):
        speed, nbytes, busy, transfers = cells[4 * k : 4 * k + 4]
        assert float(speed) == link.bandwidth
        assert int(nbytes) == plan.simulation.bytes.get((link.src, link.dst), 0)
        share = plan.simulation.busy.get((link.src, link.dst), 0) / plan.seconds * 100
        assert float(busy.removesuffix(" %")) == pytest.approx(share, abs=0.0051)
        assert (int(transfers) > 0) == (int(nbytes) > 0)


def test_the_slider_shows_another_time(driver, shown):
    """The slider changes the time, the drawing, the progress of all plans, and its text for screen readers. If "run
    until the slowest plan ends" is checked, the slider reaches this end."""
    plan = shown(8)
    at(driver, 1000)
    idle = picture(driver)  # at the end of the plan
    at(driver, 0)
    assert texts(driver, "#plans .done") == ["0 %"] * 6
    at(driver, 500)
    assert picture(driver) != idle
    assert text(driver, "#now") == f"{duration(plan.seconds / 2)} of {duration(plan.seconds)}"
    assert find(driver, "#time").get_attribute("aria-valuetext") == text(driver, "#now")
    shares = [int(share.removesuffix(" %")) for share in texts(driver, "#plans .done")]
    assert 45 <= shares[0] <= 55
    assert shares[0] > shares[1] > shares[2] > 0
    find(driver, "#time").send_keys(HOME)
    assert text(driver, "#now").startswith("0.00 us")
    find(driver, "#time").send_keys(END)
    assert texts(driver, "#plans .done")[0] == "finished"
    find(driver, "#run-on").click()
    at(driver, 1000)
    assert texts(driver, "#plans .done") == ["finished"] * 6
    assert text(driver, "#now").endswith(f"of {duration(max(other.seconds for other in plan.comparisons.values()))}")


def test_playing_and_keys(driver, shown):
    """Space plays and pauses, and the comma and the period step. F does nothing without hosts. It stops at the end."""
    shown(8)
    driver.execute_script("document.activeElement.blur()")
    press(driver, " ")
    wait(lambda: not re.match("0.00 us|mean", text(driver, "#now")))
    assert (text(driver, "#play"), find(driver, "#play").get_attribute("aria-pressed")) == ("Pause", "true")
    press(driver, " ")
    assert text(driver, "#play") == "Play"
    now = text(driver, "#now")
    press(driver, "..")
    assert text(driver, "#now") != now
    press(driver, ",,")
    assert text(driver, "#now") == now
    press(driver, "f")
    driver.execute_script("document.getElementById('speed').value = '4'")
    at(driver, 900)
    find(driver, "#play").click()
    wait(lambda: text(driver, "#play") == "Play")
    assert texts(driver, "#plans .done")[0] == "finished"


MIDDLE = """const w = explorer.wirings[0], box = w.graph.getBoundingClientRect();
const edge = w.edges.find((e) => [w.name(e.a), w.name(e.b)].sort().join() === [...arguments].sort().join());
const p = w.cy.getElementById(edge.a).renderedPosition(), q = w.cy.getElementById(edge.b).renderedPosition();
return [box.left + (p.x + q.x) / 2, box.top + (p.y + q.y) / 2].map(Math.round)"""


def test_pointing_at_a_link(driver, shown):
    """The tip of a link has its bytes, busy share and transfers. A click shows them in a table and in a chart."""
    from selenium.webdriver import ActionChains

    plan = shown(8)
    at(driver, 500)
    point(driver, *driver.execute_script(MIDDLE, "cuda:0", "cuda:1"))
    tip = wait(lambda: not find(driver, ".tip").get_property("hidden") and text(driver, ".tip"))
    lines = tip.splitlines()
    assert [line for line in lines if "→" in line] == ["cuda:0 → cuda:1", "cuda:1 → cuda:0"]
    nbytes, busy = plan.simulation.bytes["cuda:0", "cuda:1"], plan.simulation.busy["cuda:0", "cuda:1"] / plan.seconds
    assert f"{nbytes / 2**20:.4g} MiB in 14 transfers, busy {busy * 100:.2f} %" in lines[2]
    assert re.match(r"25 GB/s, \d+ % used now", lines[1])
    press(driver, "m")
    assert f"25 GB/s, {round(busy * 100)} % used on average" in text(driver, ".tip")
    ActionChains(driver).click().perform()
    assert texts(driver, "#details tbody th") == ["cuda:0 → cuda:1", "cuda:1 → cuda:0"]
    assert texts(driver, "#details tbody td")[:4] == ["25", f"{nbytes / 2**20:.4g} MiB", f"{busy * 100:.2f} %", "14"]
    assert driver.execute_script("return document.querySelectorAll('#link-chart canvas').length") == 1
    assert "cuda:0 → cuda:1" in text(driver, "#status")


def test_isolating_a_ring(driver, shown):
    """A click on a ring draws only its links. A second click, or Escape, draws all links again."""
    shown(8)
    at(driver, 420)
    everything = picture(driver)
    rings = driver.find_elements("css selector", "#trees button")
    assert len(rings) == 6
    assert text(driver, "#trees summary") == "6 rings of 8 devices: the whole buffer"
    rings[0].click()
    assert picture(driver) != everything
    assert rings[0].get_attribute("aria-pressed") == "true"
    assert text(driver, "#route-text").startswith("Shown: cuda:0 → ")
    drawn = driver.execute_script("return explorer.wirings[0].painter.lanes.filter((l) => l.partial || l.final).length")
    assert drawn == 8
    rings[0].click()
    assert picture(driver) == everything
    rings[1].click()
    press(driver, ESCAPE)
    assert picture(driver) == everything
    assert find(driver, "#route-text").get_property("hidden")


def test_the_tight_cut(driver, shown):
    """The tight cut of five GPUs of a DGX-1V is GPU 6, with its two links in both directions. C hides and shows it."""
    plan = shown(5)
    code = "return explorer.wirings[0].painter.lanes.filter((l) => l.tight).flatMap((l) => l.links)"
    tight = driver.execute_script(code)
    links = [(link.src, link.dst) for link in plan.topology.links]
    assert sorted(links[k] for k in tight) == sorted(pair for pair in links if "cuda:6" in pair)
    assert len(tight) == 4
    assert "the 2 links out of and into cuda:6 (50 GB/s)" in text(driver, "#cut-text")
    marked = "return explorer.wirings[0].cy.nodes('.cut').map((n) => n.data('text'))"
    assert driver.execute_script(marked) == ["cuda:6"]
    press(driver, "c")
    assert driver.execute_script(code) == []
    press(driver, "c")
    assert driver.execute_script(code) == tight


def test_folding_hosts(driver, shown):
    """A key, the button, a click and Enter fold and unfold hosts. A folded host has one line to the network."""
    shown(16)
    nodes = "return explorer.wirings[0].cy.nodes().length"
    assert driver.execute_script(nodes) == 16 + 2 + 8 + 3  # devices, NVSwitches, rails, and the boxes
    press(driver, "f")
    assert driver.execute_script(nodes) == 3  # two hosts and the network
    lines = driver.execute_script("return explorer.wirings[0].edges.map((e) => e.there.length + e.back.length)")
    assert lines == [16, 16]
    assert text(driver, "#fold") == "Unfold hosts"
    assert text(driver, "#status") == "All hosts are folded."
    spot = """const w = explorer.wirings[0], box = w.graph.getBoundingClientRect();
    const p = w.cy.getElementById('b0').renderedPosition(); return [box.left + p.x, box.top + p.y]"""
    point(driver, *driver.execute_script(spot))
    from selenium.webdriver import ActionChains

    ActionChains(driver).click().perform()
    assert wait(lambda: driver.execute_script(nodes) == 3 + 8 + 1)  # also the devices and the NVSwitch of host0
    assert text(driver, "#status") == "host0 is unfolded."
    focus(driver, ".graph")
    press(driver, "h", "h", ENTER)  # the second host
    assert driver.execute_script(nodes) == 3 + 2 * 9
    find(driver, "#fold").click()
    assert driver.execute_script(nodes) == 29


def test_links_by_keyboard(driver, shown):
    """Arrow keys in the wiring and in the map of links select links. The status line has the link's numbers."""
    plan = shown(5)
    focus(driver, ".graph")
    press(driver, RIGHT)
    first = text(driver, "#status")
    assert re.match(r"cuda:\d → cuda:\d\n[\d.]+ GB/s, ", first)
    press(driver, RIGHT)
    assert text(driver, "#status") != first
    press(driver, LEFT)
    assert text(driver, "#status") == first
    focus(driver, "#map-field")
    press(driver, DOWN, DOWN)
    link = plan.topology.links[driver.execute_script("return explorer.map.rows[explorer.map.row].links[0]")]
    assert text(driver, "#details tbody th") == f"{link.src} → {link.dst}"


def test_another_plan_and_one_beside_it(driver, shown):
    """The explorer can show another plan, or two plans side by side with one time slider. The list of second plans
    omits the plan that is shown."""
    plan = shown(8)
    at(driver, 0)
    names = texts(driver, "#beside option")
    names[0] = plan.algorithm
    assert names[:3] == ["ring", "TensorFlow's trees", "one_device"]
    assert [name.partition(" ")[0] for name in names[3:]] == ["without"] * 3
    other = plan.comparisons[names[1]]
    plans = driver.find_elements("css selector", "#plans input")
    plans[1].click()
    assert text(driver, ".caption") == f"{names[1]}: {duration(other.seconds)}"
    assert text(driver, "#now").endswith(f"of {duration(other.seconds)}")
    plans[0].click()
    assert texts(driver, "#beside option") == ["nothing", *names[1:]]
    enter(driver, "beside", "change", "1")
    due = [f"{name}: {duration(each.seconds)}" for name, each in zip(names[:2], (plan, other), strict=True)]
    assert texts(driver, ".caption") == due
    assert text(driver, "#now").endswith(f"of {duration(other.seconds)}")  # the end of the longer plan
    at(driver, 1000)
    parts = driver.execute_script("return explorer.wirings.map((w) => w.painter.part)")
    assert parts == [models.PARTS, models.PARTS]
    enter(driver, "beside", "change", "2")
    driver.find_elements("css selector", "#plans input")[1].click()
    assert texts(driver, "#beside option") == ["nothing", names[0], *names[2:]]
    assert [caption.partition(":")[0] for caption in texts(driver, ".caption")] == names[1:3]


def test_the_page_begins_with_the_mean(driver, shown):
    """At first, each link has its mean use over the time of the plan, and the bars compare the plans' times. M shows
    the mean again. The slider has a time axis."""
    plan = shown(8)
    assert text(driver, "#now") == f"mean over {duration(plan.seconds)}"
    level = "const p = explorer.wirings[0].painter; return p.lanes.map((lane, k) => [lane.links[0], p.levels[k]])"
    for link, shown_level in driver.execute_script(level):
        ends = plan.topology.links[link][:2]
        use = plan.simulation.busy[ends] / plan.seconds * 100
        assert abs(shown_level * 5 - use) <= 2.6
    assert texts(driver, "#axis span") == [duration(plan.seconds * k / 4) for k in range(5)]
    begin = picture(driver)
    at(driver, 0)
    assert picture(driver) != begin
    press(driver, "m")
    assert picture(driver) == begin
    assert find(driver, "#mean").get_attribute("aria-pressed") == "true"
    bars = "return [...document.querySelectorAll('#plans i')].map((bar) => new DOMMatrix(bar.style.transform).a)"
    others = [plan.seconds, *(other.seconds for other in plan.comparisons.values() if other.algorithm != "ring")]
    shares = driver.execute_script(bars)
    assert shares[:3] == pytest.approx([seconds / max(others) for seconds in others], rel=1e-3)


def test_rows_of_rails_hosts_and_links(driver, shown):
    """The map has a row for each rail and host, and for all 64 links, each with a name. A row of a rail can be folded,
    and has the mean of its links."""
    plan = shown(16)
    names = texts(driver, "#map-names > *")
    assert len(names) == 8 + 2 + 64
    assert names[:3] == ["rail0: NICs (4)", "host0/cuda:0 → rail0", "host1/cuda:0 → rail0"]
    assert names.count("cuda:0 → nvswitch") == 2  # inside host0 and host1
    heights = driver.execute_script(
        "return [...document.querySelectorAll('#map-names > *')].map((e) => e.offsetHeight)"
    )
    assert set(heights) == {13}
    assert find(driver, "#map-canvas").rect["height"] == 13 * len(names)
    find(driver, "#map-names button").click()
    assert len(texts(driver, "#map-names > *")) == len(names) - 4
    find(driver, "#map-names button").click()
    focus(driver, "#map-field")
    press(driver, DOWN)
    assert text(driver, "#details tbody th") == f"{names[0]} (4 links)"
    rail = [plan.simulation.bytes.get(link[:2], 0) for link in plan.topology.links if "rail0" in link[:2]]
    assert driver.execute_script("return document.querySelector('#details tbody td:nth-of-type(2)').title") == (
        f"{sum(rail)} bytes"
    )
    assert texts(driver, "#map-axis span") == [duration(plan.seconds * k / 4) for k in range(5)]


def test_a_link_is_taken_away(driver, shown):
    """The table of losses has the slowest first. A button takes a link away: it is crossed out, and the plan without it
    is shown beside the plan. Escape brings it back. A selected link shows what the plan loses without it."""
    plan = shown(8)
    names = texts(driver, "#losses tbody th")
    times = [seconds_of(cell) for cell in texts(driver, "#losses tbody td:nth-of-type(3)")]
    assert names[0] == "nothing"
    assert times[0] == pytest.approx(plan.seconds, rel=1e-3)
    assert times[1:] == sorted(times[1:], reverse=True)
    crossed = "return explorer.wirings.map((w) => w.painter.lanes.filter((l) => l.lost).flatMap((l) => l.links))"
    assert driver.execute_script(crossed) == [[]]
    find(driver, "#losses button").click()
    links = [[k for k, link in enumerate(plan.topology.links) if f"{link.src} - {link.dst}" == names[1]
              or f"{link.dst} - {link.src}" == names[1]]] * 2  # fmt: skip
    assert driver.execute_script(crossed) == links
    assert texts(driver, ".caption")[1].startswith(f"without {names[1]}: ")
    assert text(driver, "#loss-text").startswith(f"Taken away: {names[1]}. Without {names[1]}: ")
    press(driver, ESCAPE)
    assert driver.execute_script(crossed) == [[]]
    focus(driver, ".graph")
    press(driver, RIGHT)
    ends = text(driver, "#details tbody th").split(" → ")
    said = text(driver, "#loss p")
    assert re.match(rf"Without ({' - '.join(ends)}|{' - '.join(ends[::-1])}): [\d.]+ us by ", said), said
    find(driver, "#loss button").click()
    ((first, second), *_) = driver.execute_script(crossed)
    assert {plan.topology.links[first][:2], plan.topology.links[second][:2]} == {tuple(ends), tuple(ends[::-1])}
    assert text(driver, "#loss button") == "Bring it back"
    find(driver, "#loss button").click()
    assert driver.execute_script(crossed) == [[]]


def seconds_of(cell):
    """Return a duration on a page in seconds."""
    value, unit = cell.split()
    return float(value) * {"us": 1e-6, "ms": 1e-3, "s": 1}[unit]


def test_another_topology_and_measured_times(driver, shown):
    """A plan of another topology is shown beside the plan on one clock, with its own links. It can also be the first
    one. The measured time is beside the planned one, in a table, and in the chart."""
    plan = shown(8.5)
    assert text(driver, "#about") == f"dgx-1v · crossreduce export ... · crossreduce {cr.__version__}"
    due = [f"{plan.algorithm}: {duration(plan.seconds)}", f"mi300x: {duration(OTHER.seconds)}"]
    assert texts(driver, ".caption") == due
    edges = "return explorer.wirings.map((w) => w.edges.length)"
    assert driver.execute_script(edges) == [16, 28]
    at(driver, 300)
    parts = driver.execute_script("return explorer.wirings.map((w) => w.painter.part)")
    end = max(plan.seconds, OTHER.seconds)
    assert parts == [min(int(0.3 * end / each.seconds * models.PARTS), models.PARTS) for each in (plan, OTHER)]
    driver.find_elements("css selector", "#plans input")[1].click()
    assert driver.execute_script(edges) == [28]
    assert len(texts(driver, "#map-names > *")) == 56 + 1
    assert limited_by(OTHER.bound) in text(driver, "#cut-text")
    find(driver, "#all-links summary").click()
    assert len(wait(lambda: texts(driver, "#links tbody tr"))) == 56
    ratio = 900e-6 / plan.seconds
    assert f"measured 900.00 us ({ratio:.2f} x)" in texts(driver, "#plans .more")[0]
    row = ["64 MiB", duration(plan.seconds), "900.00 us", f"{ratio:.2f}", "74.57", "130.49"]
    assert texts(driver, "#measured tbody tr > *") == row
    assert driver.execute_script("return explorer.sizes.chart.series.at(-1).label") == "measured"


def test_a_rack(driver, shown):
    """72 GPUs of a rack are cells, each with the use of its links out and in. A click on a cell selects its link."""
    from selenium.webdriver import ActionChains

    plan = shown(72)
    cells = "return explorer.wirings[0].painter.cells.map((cell) => cell.halves.map((half) => half.links))"
    number = {link[:2]: k for k, link in enumerate(plan.topology.links)}
    names = [f"cuda:{k}" for k in range(72)]
    links = [[[number[name, "nvswitch"]], [number["nvswitch", name]]] for name in names]
    assert driver.execute_script(cells) == links
    assert driver.execute_script("return explorer.wirings[0].painter.lanes.length") == 0
    begin = picture(driver)
    at(driver, 1000)
    assert picture(driver) != begin
    spot = """const w = explorer.wirings[0], box = w.graph.getBoundingClientRect();
    const p = w.cy.getElementById('n5').renderedPosition(); return [box.left + p.x, box.top + p.y]"""
    point(driver, *driver.execute_script(spot))
    ActionChains(driver).click().perform()
    assert set(texts(driver, "#details tbody th")) == {"cuda:5 → nvswitch", "nvswitch → cuda:5"}
    assert text(driver, "#loss p").startswith("With half of cuda:5 - nvswitch, which the plan needs: ")
    size = "const w = explorer.wirings[0]; return w.cy.getElementById('n5').renderedWidth()"
    assert driver.execute_script(size) > 25


def test_the_sizes(driver, shown):
    """The table by size has the fastest plan of each size, and for each algorithm the time of the plan "by name".

    The fastest plan's time is also in the column of its algorithm. This cell has both times if the fastest plan is a
    variant that the name does not give, such as of a forest at 4 MiB on a DGX-1V."""
    plan, found = shown(8), set()  # found: whether both times of a cell are equal
    rows = driver.execute_script(
        "return [...document.querySelectorAll('#sizes tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    bests = [cr.plan(plan.topology, nbytes=nbytes) for nbytes in models.SIZES]
    names = texts(driver, "#sizes thead th")
    for row, best in zip(rows, bests, strict=True):
        assert row[1:5] == [best.algorithm, duration(best.seconds), f"{best.algbw:.2f}", f"{best.algbw * 1.75:.2f}"]
        for name, cell in zip(names[5:], row[5:], strict=True):
            by_name = duration(cr.plan(plan.topology, nbytes=best.nbytes, algorithm=name).seconds)
            fastest = duration(best.seconds) if name == best.algorithm else by_name
            assert cell == fastest + ("" if fastest == by_name else f"by name {by_name}")
            found.add(fastest == by_name)
    assert found == {True, False}
    marked = "return [...document.querySelectorAll('td.best:not(:nth-child(2))')].length"  # in algorithms' columns
    assert driver.execute_script(marked) == len(models.SIZES)
    drawn = driver.execute_script("return [explorer.sizes.chart.series[1].label, explorer.sizes.chart.data[1]]")
    assert drawn == ["auto", [best.seconds for best in bests]]


def luminance(colour):
    """Return the relative luminance of a colour, as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_colours(driver, shown):
    """The page and its drawing follow the browser's light or dark scheme. Texts have WCAG 2's least contrast, 4.5."""
    shown(8)
    at(driver, 420)
    light = picture(driver)
    code = "const s = getComputedStyle(document.querySelector(arguments[0])); return [s.color, s.backgroundColor]"
    for scheme in ("dark", "light"):
        prefer(driver, scheme)
        wait(lambda scheme=scheme: (picture(driver) == light) == (scheme == "light"))
        panel = driver.execute_script(code, ".panel")[1]
        assert (luminance(panel) > 0.5) == (scheme == "light")
        for selector in ("h1", "#facts dt", ".note", "#plans .more", "label", "#trees button", "td.best", "#play"):
            front, back = driver.execute_script(code, selector)
            back = panel if back.endswith(", 0)") else back
            low, high = sorted((luminance(front), luminance(back)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (selector, front, back)


@pytest.mark.parametrize(("devices", "width"), [(8, 400), (16, 1280), (8.5, 400), (3, 400), (3, 1280)])
def test_widths(driver, shown, devices, width):
    """In windows of 400 and 1280 pixels, nothing is wider than the window. Every control is inside and has a name."""
    shown(devices, width, 900)
    at(driver, 420)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    for control in driver.find_elements("css selector", "main button:not([hidden]), main select, main input"):
        if control.is_displayed():
            assert control.accessible_name, control.get_attribute("outerHTML")
            box = control.rect
            assert 0 <= box["x"] <= box["x"] + box["width"] <= width, control.get_attribute("outerHTML")
    assert find(driver, "#play").is_displayed()
    assert find(driver, ".graph").rect["width"] > width * 0.5
