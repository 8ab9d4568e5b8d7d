"""Groups of trees: trees of one shape are one group, whatever their roots, directions and names of devices."""

from dataclasses import replace
from fractions import Fraction

import pytest
from pairs import each
from strategies import names

from crossreduce import Topology, plan
from crossreduce.export.pictures.grouping import tree_groups
from crossreduce.planning import PLANNERS, direct, halving_doubling, hierarchical_copy, one_device, ring


def titles(schedule, topology):
    return [group.title for group in tree_groups(schedule, topology)]


def test_the_rings_of_a_dgx_1v_are_two_groups():
    """The 48 chunks run around three rings. Two of the rings have the same order of fast and slow links."""
    found = plan("dgx-1v", "all_reduce", nbytes="256M", algorithm="ring")
    groups = tree_groups(found.schedule, found.topology)
    assert [(group.title, group.link_set_count) for group in groups] == [
        ("ring: 16 x 1/48 = 1/3 of the buffer", 1),
        ("2 rings: 32 x 1/48 = 2/3 of the buffer", 2),
    ]
    assert all(tree.is_ring for group in groups for tree in group.trees)
    assert sorted(chunk for group in groups for chunk in group.chunks) == list(range(48))


@pytest.mark.parametrize(
    ("schedule", "topology", "expected"),
    [
        (one_device(names(4)), Topology.full_mesh(4), ["the whole buffer"]),
        (one_device(names(4), packs=4), Topology.full_mesh(4), ["4 x 1/4 = the whole buffer"]),  # renamed devices
        (direct(names(9)), Topology.star(9), ["9 x 1/9 = the whole buffer"]),  # the same links, other roots
        (direct(names(64)), Topology.full_mesh(64), ["64 x 1/64 = the whole buffer"]),  # trees with links of their own
        (ring(names(5)), Topology.ring(5), ["ring: 5 x 1/5 = the whole buffer"]),
        (hierarchical_copy(names(8), packs=8), Topology.full_mesh(8), ["8 x 1/8 = the whole buffer"]),
        (halving_doubling(names(8)), Topology.full_mesh(8), ["8 x 1/8 = the whole buffer"]),
        (ring(names(2)), Topology.full_mesh(2), ["2 x 1/2 = the whole buffer"]),  # one link is not a ring
    ],
    ids=["one", "renamed", "star", "mesh", "ring", "levels", "halving", "pair"],
)
def test_trees_of_one_shape_are_one_group(schedule, topology, expected):
    """Trees that use the same links, or the same links after devices are renamed, are one group."""
    assert titles(schedule, topology) == expected


def test_speeds_and_latencies_are_part_of_a_shape():
    """Trees whose links have different bandwidths or latencies are in different groups."""
    schedule = one_device(names(3), packs=3)
    assert titles(schedule, Topology.full_mesh(3)) == ["3 x 1/3 = the whole buffer"]
    links = {(link.src, link.dst): link for link in Topology.full_mesh(3, 10).links}

    def titles_with(**changes):
        """Return the titles if the links between cpu:0 and cpu:1 are changed."""
        changed = [link._replace(**changes) if {"cpu:0", "cpu:1"} == {*ends} else link for ends, link in links.items()]
        return titles(schedule, Topology(names(3), changed))

    assert titles_with(bandwidth=Fraction(20)) == ["2 x 1/3 = 2/3 of the buffer", "1/3 of the buffer"]
    assert titles_with(latency_s=Fraction(1, 10**6)) == ["2 x 1/3 = 2/3 of the buffer", "1/3 of the buffer"]


def test_shares_and_representatives():
    """The title of a group whose trees have different shares has the sum. Its representative has the largest share."""
    schedule = one_device(names(3), packs=3)
    shares = (Fraction(1, 6), Fraction(1, 2), Fraction(1, 3))
    chunks = tuple(chunk._replace(share=share) for chunk, share in zip(schedule.chunks, shares, strict=True))
    (group,) = tree_groups(replace(schedule, chunks=chunks), Topology.full_mesh(3))
    assert (group.title, group.count, group.share) == ("3 trees, the whole buffer", 3, 1)
    assert (group.tree.roots, group.tree.share) == (("cpu:1",), Fraction(1, 2))


@pytest.mark.parametrize(("algorithm", "topology"), each(PLANNERS, [Topology.star(6), Topology.mesh(2, 3)]), ids=str)
def test_groups_are_a_partition(algorithm, topology):
    """Each chunk is in one tree of one group, shares add up to 1, and the links of trees are links of the topology."""
    schedule = PLANNERS[algorithm](topology.devices)
    groups = tree_groups(schedule, topology)
    assert sorted(chunk for group in groups for chunk in group.chunks) == list(range(len(schedule.chunks)))
    assert sum(group.share for group in groups) == 1
    for tree in (tree for group in groups for tree in group.trees):
        assert tree.share == sum(schedule.chunks[chunk].share for chunk in tree.chunks)
        assert {(src, dst) for src, dst, _ in tree.links} <= topology.by_ends.keys()
    assert groups == tree_groups(schedule, topology)
