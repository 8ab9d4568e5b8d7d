"""The registry of exporters, which ``crossreduce export`` uses. The table CHECKS has a check of each format."""

import json
import random
from contextlib import nullcontext
from dataclasses import replace

import chakra_reader
import msccl_machine
import mscclpp_values
import pytest

import crossreduce as cr
from crossreduce.export import EXPORTERS, format_of
from crossreduce.export.fitting import fitting
from crossreduce.export.formats.msccl.verifier import verify_msccl_xml
from crossreduce.export.formats.mscclpp import verify_mscclpp_json
from crossreduce.export.formats.nccl_graph import rings

GPUS = tuple(f"cuda:{k}" for k in range(4))
TOPOLOGY = cr.Topology.ring(GPUS, 25, 1e-6)


def check_chakra(plan, files):
    chakra_reader.check(plan.schedule, plan.nbytes, files.values(), random.Random(0))


def check_msccl(plan, text):
    assert verify_msccl_xml(text).ngpus == len(plan.schedule.devices)
    assert msccl_machine.fault(text, 0, 3, slots=1) is None


def check_mscclpp(plan, text):
    assert json.loads(text)["collective"] == "allreduce"
    assert mscclpp_values.fault(text) is None


def check_nccl_graph(plan, text):
    assert text.count("<channel>") == len(rings(plan.schedule))


def check_schedule(plan, text):
    assert cr.Schedule.from_json(text) == plan.schedule


def check_trace(plan, text):
    transfers = [event for event in json.loads(text)["traceEvents"] if event.get("cat") == "transfer"]
    sent_in_ring = 2 * (len(GPUS) - 1) * plan.nbytes
    assert sum(event["args"]["bytes"] for event in transfers) == pytest.approx(sent_in_ring)


# A new exporter adds one row: a function that raises unless the text, or the dict of files, is right for the plan.
CHECKS = {
    "chakra": check_chakra,
    "msccl": check_msccl,
    "mscclpp": check_mscclpp,
    "nccl-graph": check_nccl_graph,
    "schedule": check_schedule,
    "trace": check_trace,
}


@pytest.mark.parametrize("name", EXPORTERS)
def test_the_text_is_right_for_the_plan(name):
    """Every exporter writes text that is right for a plan, and equal text for equal plans. A schedule that ``verify``
    rejects is refused by every exporter but that of schedules."""
    plan = cr.plan(TOPOLOGY, nbytes=4096, algorithm="ring")
    text = EXPORTERS[name].write(plan)
    CHECKS[name](plan, text)
    assert EXPORTERS[name].write(replace(plan, schedule=cr.Schedule.from_json(plan.schedule.to_json()))) == text
    wrong = replace(plan, schedule=replace(plan.schedule, rounds=plan.schedule.rounds[:-1]))  # without the last round
    with pytest.raises(cr.ScheduleError, match="stale chunk 0") if name != "schedule" else nullcontext():
        EXPORTERS[name].write(wrong)


def test_suffixes_determine_the_format():
    """Each suffix, in lower or upper case, belongs to one exporter. Of the suffixes of a file, the longest counts."""
    suffixes = {exporter.suffix: name for name, exporter in EXPORTERS.items() if exporter.suffix}
    assert len(suffixes) == sum(bool(exporter.suffix) for exporter in EXPORTERS.values())
    for suffix, name in suffixes.items():
        assert format_of("a" + suffix) == format_of("A" + suffix.upper()) == name
    assert format_of("a.txt") is None


def test_a_plan_that_does_not_fit_is_replaced():
    """If a format cannot hold the best plan, ``fitting`` tries others, the fastest first. It returns the first one that
    fits, with its text and the reason. A plan that fits is not replaced."""
    star = cr.Topology.star(24, 450, 1e-6)
    best = cr.plan(star, "all_reduce", "16 MiB", operation_s=0, granularity=0.02)
    tried = []

    def write(plan):
        tried.append(plan.seconds)
        return str(EXPORTERS["mscclpp"].write(plan))

    found = fitting(best, write)
    assert "direct" in found.refused
    assert "16 channels per threadblock" in found.refused
    assert tried[0] == best.seconds < found.plan.seconds == tried[-1]
    assert tried[1:] == sorted(tried[1:])
    assert found.plan.request == best.request._replace(algorithm=found.plan.algorithm)
    assert verify_mscclpp_json(found.text).collective == "allreduce"
    small = cr.plan(TOPOLOGY, "all_reduce", "1 MiB", operation_s=0)
    assert fitting(small, write) == (small, str(EXPORTERS["mscclpp"].write(small)), "")


def test_a_replacement_is_for_the_same_request():
    """A replacement has the root and the devices of the request. If no algorithm's plan can be written, the error is
    that of the fastest plan."""
    for options in ({"root": 2}, {"sources": GPUS[:3], "destinations": GPUS[:3]}):
        best = cr.plan(TOPOLOGY, "all_reduce", "1 MiB", **options)

        def write(plan, best=best):
            if plan == best:
                raise cr.PlanError("the first one")
            return "text"

        found = fitting(best, write)
        assert found.plan.request == best.request._replace(algorithm=found.plan.algorithm)
        assert found.plan.root == best.root
        assert found.plan.schedule != best.schedule

    def fails(plan):
        raise cr.PlanError(plan.algorithm)

    with pytest.raises(cr.PlanError, match=f"^{best.algorithm}$"):
        fitting(best, fails)
