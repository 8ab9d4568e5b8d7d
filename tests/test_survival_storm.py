"""Random failures of ranks of the torch backend, after which the others go on.

CROSSREDUCE_STORM=200 in the environment runs 200 storms instead of a few.
"""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch  # noqa: F401 - the ranks are forked with it
from ranks import Died, ranks
from survival_storm import FAILURES, Failure, Shared, lives
from test_torch_storm import free_port

SEEDS = range(int(os.environ.get("CROSSREDUCE_STORM", "12")))
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "exit": signal.SIGUSR1, "exception": signal.SIGUSR2}
PLACES = ("any", "any", "any", "shrink", "agree", "grow", "join")
LIMIT_S = 15


@pytest.fixture(autouse=True)
def dumps(tmp_path, monkeypatch):
    """Let ranks write their flight recorder dumps into a directory of the test."""
    monkeypatch.setenv("CROSSREDUCE_DUMP_DIR", str(tmp_path / "dumps"))


def state(pid):
    """Return the state of a process as the system shows it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_down(pid):
    return state(pid) in "ZTX"


def wait_until(true, what):
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def own_lines(text):
    """Return what a process wrote, without the places in the test's runner."""
    return "\n".join(line for line in text.splitlines() if not re.search("pytest|pluggy|runpy|tests/ranks", line))


def drawn(seed, folder):
    """Return a random storm."""
    draw = random.Random(seed)
    size, joiners = draw.randint(2, 6), draw.choice([0, 0, 1, 2])
    victims = draw.sample(range(size), draw.randint(1, min(3, size - 1)))
    if seed % 4 == 0:
        victims = list(dict.fromkeys([0, *victims]))[: size - 1]  # the rank that serves the store is the first one
    failures = []
    for victim in victims:
        where = draw.choice(PLACES) if failures else draw.choice(["any", "any", "agree"])
        if where == "join" or (where == "grow" and not joiners):
            where = "any"
        failures.append({"who": victim, "where": where})
    falling = [size + joiner for joiner in range(joiners) if draw.random() < 0.3]
    failures += [{"who": joiner, "where": draw.choice(["join", "any"])} for joiner in falling]
    for each in failures:
        each |= {"how": draw.choice(FAILURES), "skip": draw.randrange(20) if each["where"] == "agree" else 0}
        each |= {"after": int(10 ** (draw.random() * 3.5)), "delay_s": draw.choice([0, draw.random() * 0.1])}
    stops = any(each["how"] == "stop" for each in failures)
    return {
        "seed": seed,
        "folder": str(folder),
        "size": size,
        "joiners": joiners,
        "failures": failures,
        "join_after_s": draw.random() * 0.5,
        "timeout_s": 1.5 if stops else 1800,
        "address": "127.0.0.1",
        "port": free_port(),
        "namespaces": None,
    }


def storm(case, shared):
    """Return a function that lets the processes of a storm fail."""
    draw = random.Random(case["seed"])
    size, folder = case["size"], Path(case["folder"])
    total = size + case["joiners"]
    victims = {each["who"] for each in case["failures"]}
    others = [process for process in range(total) if process not in victims]

    def begun(pids):
        try:
            storm_through(pids)
        except AssertionError as error:
            for pid in pids:
                if not is_down(pid):
                    os.kill(pid, signal.SIGQUIT)
            time.sleep(0.5)
            texts = [f"{path.name}:\n{own_lines(path.read_text())}" for path in sorted(folder.glob("output*"))]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError("\n".join([str(error), json.dumps(case), *texts])) from None

    def storm_through(pids):
        wait_until(lambda: all(Path(folder, f"ready{each}").exists() for each in range(size)), "the ranks do not begin")
        time.sleep(draw.random() * 0.3)
        for each in case["failures"]:
            if each["where"] == "any":
                if each["who"] >= size:  # when it joins
                    time.sleep(case["join_after_s"])
                time.sleep(each["delay_s"])
                os.kill(pids[each["who"]], SIGNALS[each["how"]])
        wait_until(lambda: all(is_down(pids[victim]) for victim in victims), "victims are alive")
        counts = [shared[process] for process in others]
        wait_until(
            lambda: all(shared[process] > count for process, count in zip(others, counts, strict=True)),
            f"the others do not go on: {counts}",
        )
        stopped = [victim for victim in victims if state(pids[victim]) == "T"]
        for victim in stopped:
            os.kill(pids[victim], signal.SIGCONT)
        if stopped:
            time.sleep(0.2)
        shared.end()

    return begun


def check(case, found):
    """Require that all who are left have gone on, with the same results; return them."""
    note = json.dumps(case)
    victims = {each["who"]: each["how"] for each in case["failures"]}
    steps = {}
    for process, one in enumerate(found):
        how = victims.get(process)
        if how is None:
            assert isinstance(one, dict), (note, process, one, getattr(one, "__notes__", ""))
            assert one["end"] == "done", (note, process, one["end"])
        elif how in ("exit", "exception"):
            assert isinstance(one, (SystemExit, Failure)), (note, process, one, getattr(one, "__notes__", ""))
        elif how == "kill":
            assert isinstance(one, Died), (note, process, one)
        else:
            assert isinstance(one, dict), (note, process, one, getattr(one, "__notes__", ""))
        if isinstance(one, dict):
            numbers = [number for number, *_ in one["records"]]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True, (note, process)
            for number, *result in one["records"]:
                steps.setdefault(number, {})[process] = result
    before = 0
    for number, results in sorted(steps.items()):
        assert len({tuple(result) for result in results.values()}) == 1, (note, number, results)
        mask, total = next(iter(results.values()))
        assert total == before + mask, (note, number, results)
        before = total
        assert all(mask >> process & 1 for process in results), (note, number, results)
    return [one for process, one in enumerate(found) if process not in victims]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_others_go_on(tmp_path, seed):
    """Whichever ranks die, stop or raise, wherever: the others go on with the same results on all of them, none of
    them hangs, and a rank that was stopped is excluded, or still in the group."""
    case, shared = drawn(seed, tmp_path), Shared()
    total = case["size"] + case["joiners"]
    found = ranks(total, lives, case, shared, check=False, begun=storm(case, shared), timeout_s=3 * LIMIT_S)
    rest = check(case, found)
    if log := os.environ.get("CROSSREDUCE_STORM_LOG"):
        with Path(log).open("a") as opened:
            figures = {
                "case": case,
                "delays": [one["delays"] for one in rest],
                "slowest": [one["slowest"] for one in rest],
            }
            opened.write(json.dumps(figures) + "\n")
