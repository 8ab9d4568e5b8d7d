"""The links that limit a bound: the text about them names the devices or the host that has these links."""

import re
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest
from strategies import names

import crossreduce as cr
from crossreduce import Link, Topology
from crossreduce.planning.optimal.bounds.tight_cuts import heaviest_cuts, limited_by

DGX = Topology.machine("dgx-1v")
H100S = Topology.machine("hgx-h100", hosts=2)


def test_hosts_are_named_by_their_cards():
    """The text about a cut around a host names the host, and has the number and the speed of its NICs."""
    assert limited_by(cr.bound(H100S, "broadcast", "host0/cuda:3")) == "the 8 NICs into host1 (400 GB/s)"
    assert limited_by(cr.bound(H100S, "reduce", "host0/cuda:3")) == "the 8 NICs out of host1 (400 GB/s)"
    sixteen = Topology.machine("hgx-h100", hosts=16)
    assert limited_by(cr.bound(sixteen, "all_gather")) == "the 8 NICs into host0 (400 GB/s)"
    # Several cuts prove the next bound, so either text is right.
    ndv2 = Topology.machine("ndv2", hosts=2)
    both = "the NIC into and out of host0 (12.5 GB/s) and the NIC into and out of host1 (12.5 GB/s)"
    assert limited_by(cr.bound(ndv2, "all_reduce")) in (both, "the NIC into host0 (12.5 GB/s)")


def odd_hosts(cards):
    """Return hosts of two GPUs that a switch joins; ``cards[k]`` GPUs of host k have a card of 25 GB/s."""
    names_, links = [], []
    for host, count in enumerate(cards):
        gpus = [f"host{host}/cuda:{k}" for k in range(2)]
        names_ += gpus
        ends = [(gpu, f"host{host}/nvswitch", 300) for gpu in gpus] + [(gpu, "net", 25) for gpu in gpus[:count]]
        links += [Link(*pair, width) for a, b, width in ends for pair in ((a, b), (b, a))]
    return Topology(names_, links, [*(f"host{k}/nvswitch" for k in range(len(cards))), "net"])


A100S = Topology.machine("dgx-a100", hosts=2)
WITHOUT = {"host0": ("host0/cuda:3", "rail3"), "host1": ("host1/cuda:5", "rail5")}
LOST_CARDS = {
    "a card of 2 at host0": (odd_hosts([1, 2]), "host0", "NIC"),
    "a card of 2 at host1": (odd_hosts([2, 1]), "host1", "NIC"),
    "three hosts": (odd_hosts([2, 1, 2]), "host1", "NIC"),
    "rail 3 at host0": (A100S.without_link(*WITHOUT["host0"]), "host0", "7 NICs"),
    "rail 5 at host1": (A100S.without_link(*WITHOUT["host1"]), "host1", "7 NICs"),
    "rail 2 at host2": (Topology.machine("dgx-a100", hosts=3).without_link("host2/cuda:2", "rail2"), "host2", "7 NICs"),
    "rail 0 of H100": (Topology.machine("hgx-h100", hosts=2).without_link("host1/cuda:0", "rail0"), "host1", "7 NICs"),
}


def placements(limit):
    """Yield a bound with each of its cuts, in which switches of the network are on either side if the cut is equal."""
    (cut,) = limit.cuts
    for count in range(3):
        for moved in combinations([switch.name for switch in limit.topology.switches if "/" not in switch.name], count):
            for nodes in (cut.nodes ^ {*moved}, cut.nodes | {*moved}, cut.nodes - {*moved}):
                other = replace(limit, cuts=(cut._replace(nodes=nodes),))
                if other.proved() == limit.algbw:
                    yield other


@pytest.mark.parametrize("collective", ["reduce", "broadcast", "reduce_scatter", "all_gather", "all_reduce"])
@pytest.mark.parametrize("name", LOST_CARDS)
def test_the_host_that_lost_a_card_is_named(name, collective):
    """If a host has fewer cards than others, these cards limit the rate, and the text names this host only."""
    topology, host, cards = LOST_CARDS[name]
    limit = cr.bound(topology, collective)
    hosts = [each for each in dict.fromkeys(device.partition("/")[0] for device in topology.devices) if each != host]
    for bound in placements(limit) if len(limit.cuts) == 1 else [limit]:
        text = limited_by(bound)
        if "/cuda" in text or text.startswith("every device"):  # the links of a single device are the limit
            assert "rail" in name
            assert collective in ("reduce_scatter", "all_gather", "all_reduce")
        elif len(limit.cuts) == 1:
            assert re.fullmatch(rf"the {cards} (into|out of) {host} \(\d+ GB/s\)", text)
            cut = heaviest_cuts(bound)[0]
            assert {*cut.nodes} >= {device for device in topology.devices if device.startswith(host)}
            assert not any(node.startswith((*hosts, "net", "rail")) for node in cut.nodes)
            assert all(host in (link.src.partition("/")[0], link.dst.partition("/")[0]) for link in cut.links)
        else:
            assert re.match(rf"the {cards} \S+ [^(]+ {host} ", text)


def test_cards_of_both_hosts():
    """If both hosts lack the card of a rail, six cards of each cross, and the text has the number of all its cards."""
    both = A100S.without_link(*WITHOUT["host0"]).without_link(*WITHOUT["host1"])
    for bound in placements(cr.bound(both, "broadcast", "host0/cuda:0")):
        assert re.fullmatch(r"6 of the 7 NICs (into host1|out of host0) \(150 GB/s\)", limited_by(bound))


def test_links_inside_the_network_are_named():
    """Links between switches of the network are not the cards of a host."""
    links = [(f"host{h}/cuda:{g}", f"leaf{h}", 50) for h in range(3) for g in range(2)]
    links += [(f"host{h}/cuda:0", f"host{h}/cuda:1", 300) for h in range(3)]
    links += [(f"leaf{h}", "spine", 40 if h == 1 else 200) for h in range(3)]
    devices = [f"host{h}/cuda:{g}" for h in range(3) for g in range(2)]
    both = [Link(*ends, width) for a, b, width in links for ends in ((a, b), (b, a))]
    limit = cr.bound(Topology(devices, both, ["leaf0", "leaf1", "leaf2", "spine"]), "broadcast", "host0/cuda:0")
    assert limited_by(limit) == "the link spine -> leaf1 (40 GB/s)"


def test_the_end_with_the_slow_links_is_named():
    """Of two devices around a switch, the one with the slower link limits the rate, whichever is the root."""
    ends = [("cpu:0", "switch", 50), ("cpu:1", "switch", 25)]
    two = Topology(names(2), [Link(*pair, width) for a, b, width in ends for pair in ((a, b), (b, a))], ["switch"])
    assert limited_by(cr.bound(two, "broadcast", "cpu:0")) == "the link into cpu:1 (25 GB/s)"
    assert limited_by(cr.bound(two, "broadcast", "cpu:1")) == "the link out of cpu:1 (25 GB/s)"


def test_cuts_around_devices_are_named():
    """The text about a cut has the direction of its links, the devices inside, and the sum of the bandwidths."""
    links = [("cpu:0", "cpu:1", 9), ("cpu:1", "cpu:2", 3), ("cpu:2", "cpu:3", 9)]
    line = Topology(names(4), [Link(*ends, width) for a, b, width in links for ends in ((a, b), (b, a))])
    assert limited_by(cr.bound(line, "broadcast", "cpu:0")) == "the link into {cpu:2, cpu:3} (3 GB/s)"
    assert limited_by(cr.bound(line, "reduce", "cpu:0")) == "the link out of {cpu:2, cpu:3} (3 GB/s)"
    for half in ("cpu:0, cpu:1", "cpu:2, cpu:3"):
        assert f"the link into and out of {{{half}}} (3 GB/s)" in limited_by(cr.bound(line, "all_reduce"))


@pytest.mark.parametrize(
    ("topology", "words", "width"),
    [
        (DGX, "150 GB/s by 4 links in and out", 150),
        (Topology.star(8, 450), "450 GB/s by 1 link in and out", 450),
        (Topology.full_mesh(5, 2), "8 GB/s by 4 links in and out", 8),
        (Topology.machine("mi300x"), "448 GB/s by 7 links in and out", 448),
        (Topology.ring(7, Fraction(1, 2)), "1 GB/s by 2 links in and out", 1),
    ],
)
def test_equal_devices_are_named_together(topology, words, width):
    """If all devices are equal, the text describes the links of each one. Their bandwidth gives the bound."""
    limit, n = cr.bound(topology, "all_reduce"), len(topology.devices)
    assert limited_by(limit) == f"every device's own links: {words}"
    assert limit.algbw == Fraction(n * width, 2 * (n - 1))
