"""All orders in which a small file can run, searched state by state: MSCCL XML on the machine of msccl_machine.py, and
MSCCL++ plans on an executor that is here.

It shares no code with the library. The rules for plans are those of docs/mscclpp-files.md. Threads meet only at a nop
or barrier. Thread k signals on the k-th channel; other threads move one word each (in a long message each thread moves
some words, so none may rely on what a thread that waits knows). A port channel makes its transfers later. Between two
calls the user of a GPU reads its output and writes its input.

A state is how far each thread has come. If no two accesses race, it determines the memory, so the values of one
execution are those of all. Packets, relaxed signals, switches and groups of threadblocks are not modelled.
"""

import copy
from collections import Counter
from itertools import combinations

from msccl_machine import LOADING, RECEIVING, STORING, Machine, RunError
from mscclpp_values import Interpreter


def faults(start, most=20_000):
    """Return which of "race" and "deadlock" some order of the events has, or ``None`` if there are too many states.

    Two events race if both are possible in one state, and one writes what the other one accesses. Of events that affect
    no other event ("quiet"), one is done at once: each order can be changed so, without a change of its faults.
    """
    seen, waiting, found = set(), [start], set()
    while waiting:
        now = waiting.pop()
        if now.key() in seen:
            continue
        seen.add(now.key())
        if len(seen) > most:
            return None
        able = now.able()
        if not able and not now.is_over():
            found.add("deadlock")
        if "race" not in found and any(now.conflict(a, b) for a, b in combinations(able, 2)):
            found.add("race")
        quiet = [event for event in able if now.is_quiet(event)]
        for event in quiet[:1] or able:
            later = now.copied()
            later.do(event)
            waiting.append(later)
    return found


class NotModelledError(Exception):
    """The plan has an operation that the executor does not model."""


class PlanState:
    """How far each thread, port channel and user of a plan has come, in several calls."""

    def __init__(self, text, cells=1, calls=2, root=0):
        self.model = Interpreter(text, cells, root)
        self.calls, gpus = calls, self.model.gpus
        self.threads = []  # (rank, threadblock, actions of a call)
        self.users = [0] * len(gpus)  # how often the user of each GPU has read the output and written the input
        self.starts = {}  # the initial values of semaphores
        for rank, gpu in enumerate(gpus):
            self.starts |= {("free", rank, k): s["init_value"] for k, s in enumerate(gpu.get("semaphores", ()))}
            for block in gpu["threadblocks"]:
                for actions in self._threads(rank, block):
                    self.threads.append((rank, (rank, block["id"]), actions))
        self.at = [0] * len(self.threads)
        self.counts = Counter(self.starts)
        self.queues = {}  # by port channel, the transfers and signals that it has not made yet
        self.uses = {}  # by (type, object) of a signal, wait or acquire, the threads that do it
        for number, (_, _, actions) in enumerate(self.threads):
            for kind, what, *_ in actions:
                self.uses.setdefault((kind, what), set()).add(number)
        for (kind, _), numbers in self.uses.items():
            blocks = {self.threads[number][1] for number in numbers}
            if (kind == "post" and len(numbers) > 1) or (kind in ("signal", "wait") and len(blocks) < len(numbers)):
                raise NotModelledError(
                    "one channel is used by several threads of a threadblock, or posted to by several"
                )

    def _threads(self, rank, block):
        """Return the actions of each thread of a threadblock in a call: (type, object, what else it needs)."""
        lists, joins = {0: []}, []
        for name, thread, *action in self._actions(rank, block):
            if name == "join":
                for actions in (joins, *lists.values()):
                    actions.append(("join", (rank, block["id"])))
            else:
                lists.setdefault(thread, [*joins]).append((name, *action))
        return [*lists.values()]

    def _actions(self, rank, block):
        """Yield (type, thread, object, ...) for each action of a threadblock, and ("join", -1) for all threads."""
        channels = {used["channel_type"]: used["channel_ids"] for used in block["channels"]}
        buffers = {used["access_channel_type"]: used["remote_buffer_ids"] for used in block["remote_buffer_refs"]}
        met = Counter()
        for op in block["ops"]:
            loop = op["name"] == "pipeline"
            unit = op["iter_context"]["unit_size"] // 16 if loop else 1 << 32
            times = -(-op["iter_context"]["num_chunks"] * self.model.cells // unit) if loop else 1
            for k in range(times):
                for inner in op["ops"] if loop else [op]:
                    yield from self._operation(rank, channels, buffers, inner, k * unit, unit, met)

    def _operation(self, rank, channels, buffers, op, offset, unit, met):
        name, kind = op["name"], op.get("channel_type", "none")
        if max(op.get("channel_ids", ()), default=-1) >= len(channels.get(kind, ())):
            raise NotModelledError("a channel that the threadblock does not have")
        if "tbg_info" in op:
            raise NotModelledError("a group of threadblocks")
        if name == "nop":
            yield "join", -1
        elif name == "barrier":
            bar = rank, op["barrier_id"]
            met[bar] += 1
            yield "join", -1
            yield "arrive", 0, bar
            yield "leave", 0, bar, met[bar], op["num_threadblocks"]
            yield "join", -1
        elif name in ("sem_acquire", "sem_release"):
            for thread, number in enumerate(op["semaphore_ids"]):
                yield name[4:], thread, (rank, number)
        elif name in ("signal", "wait", "flush"):
            for thread, number in enumerate(channels[kind][k] for k in op["channel_ids"]):
                out, back = self.model.ends(rank, kind, number)
                if kind == "port" and name == "signal":
                    yield "post", thread, out, None
                else:
                    yield name, thread, back if name == "wait" else out
        elif name in ("put", "copy", "re", "rre", "res"):
            srcs, dsts = (
                [self._places(rank, kind, buffers, entry, offset, unit) for entry in op.get(key, ())]
                for key in ("src_buff", "dst_buff")
            )
            pairs = [([src], [dst]) for src, dst in zip(srcs, dsts, strict=True)] if name == "put" else [(srcs, dsts)]
            for thread, (sources, targets) in enumerate(pairs):
                moves = [(tuple(p[w] for p in sources), tuple(p[w] for p in targets)) for w in range(len(sources[0]))]
                if kind == "port":
                    channel = channels[kind][op["channel_ids"][thread]]
                    if moves:
                        yield "post", thread, self.model.ends(rank, kind, channel)[0], tuple(moves)
                else:
                    for word, move in enumerate(moves):
                        yield "move", ("word", word), None, (move,)
        else:
            raise NotModelledError(name)

    def _places(self, rank, kind, buffers, entry, offset, unit):
        cells = self.model.cells
        start, count = entry["index"] * cells + offset, max(0, min(entry["size"] * cells - offset, unit))
        target, area, part = self.model.gpus[rank], entry.get("type"), 0 if kind == "port" else None
        owner = rank
        if entry.get("buffer_id", -1) >= len(buffers.get(kind, ())):
            raise NotModelledError("a buffer that the threadblock may not use")
        if "buffer_id" in entry:
            found = target["remote_buffers"][buffers[kind][entry["buffer_id"]]]
            owner, area, part = found["rank"], found["type"], rank
        places = self.model.places(owner, area, start, count, part)
        if count and not {*places} <= self._memory(owner):
            raise NotModelledError("bytes outside of a buffer")
        return places

    def _memory(self, rank):
        """Return the addresses of all cells of a GPU."""
        gpu, cells = self.model.gpus[rank], self.model.cells
        sizes = {"i": "input_chunks", "o": "output_chunks", "s": "scratch_chunks"}
        areas = [self.model.places(rank, b, 0, gpu[key] * cells) for b, key in sizes.items()]
        return {place for area in areas for place in area}

    # What ``faults`` needs.

    def copied(self):
        made = copy.copy(self)
        made.at, made.users, made.counts, made.queues = [*self.at], [*self.users], Counter(self.counts), {**self.queues}
        return made

    def key(self):
        return (*self.at, *self.users, *((name, queue) for name, queue in sorted(self.queues.items()) if queue))

    def is_over(self):
        return all(count > self.calls for count in self.users) and not any(self.queues.values())

    def action(self, number):
        """Return the next action of a thread, or ``None`` if it waits for its call, or has ended."""
        rank, _, actions = self.threads[number]
        call, position = divmod(self.at[number], len(actions)) if actions else (self.calls, 0)
        return actions[position] if call < min(self.calls, self.users[rank]) else None

    def able(self):
        """Return the possible events: (type, number of the thread, or name of the user, port or threadblock)."""
        events = []
        for number in range(len(self.threads)):
            action = self.action(number)
            if action is not None and action[0] == "join":
                group = [k for k, thread in enumerate(self.threads) if thread[1] == action[1]]
                if number == group[0] and all((self.action(k) or (None,))[0] == "join" for k in group):
                    events.append(("join", tuple(group)))
            elif action is not None and self._can(action, number):
                events.append(("thread", number))
        for rank, count in enumerate(self.users):
            mine = [(at, len(t[2])) for at, t in zip(self.at, self.threads, strict=True) if t[0] == rank]
            if count <= self.calls and all(at >= count * length for at, length in mine):
                events.append(("user", rank))
        return [*events, *(("port", name) for name, queue in self.queues.items() if queue)]

    def _can(self, action, number):
        kind, what, *more = action
        if kind == "wait":
            return self.counts["signal", what] > 0
        if kind == "acquire":
            return self.counts["free", *what] > 0
        if kind == "flush":
            return not self.queues.get(what)
        if kind == "leave":
            times, blocks = more
            call = self.at[number] // len(self.threads[number][2])
            of_call = sum(each[:2] == ("leave", what) for each in self.threads[number][2])
            return self.counts["met", *what] >= (call * of_call + times) * blocks
        return True

    def accesses(self, event):
        """Return what an event reads and what it writes. A signal, wait or acquire writes its counter."""
        kind, which = event
        if kind == "user":
            cells = {cell for cell in self._memory(which) if cell[1] != "s"}
            return cells, cells
        if kind == "join":
            return set(), set()
        name, what, *more = ("post", which, self.queues[which][0]) if kind == "port" else self.action(which)
        if name == "move" or (kind == "port" and more[0]):
            reads = {cell for srcs, _ in more[0] for cell in srcs}
            return reads, {cell for _, dsts in more[0] for cell in dsts}
        counted = name in ("signal", "wait", "acquire") and len(self.uses[name, what]) > 1
        return set(), {(name, what)} if counted else set()

    def conflict(self, a, b):
        (reads, writes), (others, stores) = self.accesses(a), self.accesses(b)
        return bool(writes & (others | stores) or reads & stores)

    def is_quiet(self, event):
        return not any(self.accesses(event))

    def do(self, event, memory=None):
        """Do an event. ``memory`` has the values of cells, which a move reads and writes."""
        kind, which = event
        if kind == "user":
            self.users[which] += 1
        elif kind == "join":
            for number in which:
                self.at[number] += 1
        elif kind == "port":
            move, *rest = self.queues[which]
            self.queues[which] = tuple(rest)
            self._move(move, memory)
            self.counts["signal", which] += move is None
        else:
            name, what, *more = self.action(which)
            if name == "move":
                self._move(more[0], memory)
            elif name == "post":
                self.queues[what] = (*self.queues.get(what, ()), more[0])
            elif name in ("signal", "wait"):
                self.counts["signal", what] += 1 if name == "signal" else -1
            elif name in ("release", "acquire"):
                self.counts["free", *what] += 1 if name == "release" else -1
            elif name == "arrive":
                self.counts["met", *what] += 1
            self.at[which] += 1

    def _move(self, moves, memory):
        for srcs, dsts in moves or () if memory is not None else ():
            if any(src not in memory for src in srcs):
                memory["fault"] = "unwritten"
            total = sum(memory.get(src, 0) for src in srcs)
            memory.update(dict.fromkeys(dsts, total))

    def wrong(self):
        """Run one order on values. Return whether a read is of no value, a result wrong, or a signal left over."""
        state, model, call = self.copied(), self.model, 0
        memory = model.memory = {}
        model.value = lambda rank, cell: (model.n + 2) ** rank * (1 + cell) + 1000 * call
        while able := state.able():
            event = next((each for each in able if each[0] != "user"), able[0])
            if event[0] == "user":
                rank, call = event[1], state.users[event[1]]
                if call and (model.coll != "reduce" or rank == model.root) and model.output(rank) != model.due(rank):
                    return True
                for cell in state.accesses(event)[0]:
                    memory.pop(cell, None)
                call += 1
                if model.coll != "broadcast" or rank == model.root:
                    size = model.gpus[rank]["input_chunks"] * model.cells
                    memory.update(
                        (cell, model.value(rank, k)) for k, cell in enumerate(model.places(rank, "i", 0, size))
                    )
            state.do(event, memory)
        counts = {key: count for key, count in state.counts.items() if key[0] != "met"}
        return "fault" in memory or any(count != self.starts.get(key, 0) for key, count in counts.items())


def plan_faults(text, cells=1, root=0, most=20_000):
    """Return the faults of a plan: some of "race", "deadlock" and "wrong". ``None``: it has too many states."""
    state = PlanState(text, cells, root=root)
    found = faults(state, most)
    if found is None:
        return None
    return found if "race" in found else found | ({"wrong"} if state.wrong() else set())


class Unchecked(Machine):
    """A machine whose memory has no limits and no values, to see only what waits for what."""

    def cells(self, place, span, offset=None):
        now = self.programs[place][self.at[place]]
        return [(*span, offset, k) for k in range(now.count)]

    def load(self, cell):
        return 0

    def check(self):
        pass


class FileState:
    """How far each threadblock of an MSCCL file has come. ``errors`` collects the errors of all orders."""

    def __init__(self, machine):
        self.machine, self.errors, self.stopped = machine, [], False

    def copied(self):
        made, machine = copy.copy(self), copy.copy(self.machine)
        for name in ("memory", "at", "flags", "passed", "loaded"):
            setattr(machine, name, dict(getattr(machine, name)))
        machine.queues = copy.copy(machine.queues)
        machine.queues.update((key, queue.copy()) for key, queue in machine.queues.items())
        made.machine = machine
        return made

    def key(self):
        machine = self.machine
        return (self.stopped, *machine.at.values(), *machine.passed.values(), *sorted(machine.loaded))

    def able(self):
        return self._tried(lambda m: [(place, e) for place in m.programs for e in m.events(place)]) or []

    def is_over(self):
        machine = self.machine
        over = all(machine.at[place] == len(program) for place, program in machine.programs.items())
        if over:
            self._tried(Machine.check if type(machine) is Machine else lambda _: None)
        return over or self.stopped

    def do(self, event):
        self._tried(lambda machine: machine.do(*event))

    def _tried(self, act):
        if not self.stopped:
            try:
                return act(self.machine)
            except RunError as error:
                self.errors.append(str(error))
                self.stopped = True
        return None

    def is_quiet(self, event):
        return type(self.machine) is Unchecked and event[1] == "load"

    def conflict(self, a, b):
        if type(self.machine) is Unchecked or a[0] == b[0]:
            return False
        (reads, writes), (others, stores) = self.accesses(*a), self.accesses(*b)
        return bool(writes & (others | stores) or reads & stores)

    def accesses(self, place, event):
        """Return the cells that an event reads, and those that it writes."""
        machine = self.machine
        now, k = machine.programs[place][machine.at[place]], machine.passed[place]
        try:
            if event == "local":
                reads = {cell for offset in now.adds for cell in machine.cells(place, now.src, offset)}
                return reads, set(machine.cells(place, now.dst))
            reads = set()
            if now.type in LOADING and (event == "load" or now.type not in RECEIVING or place not in machine.loaded):
                cells = machine.cells(place, now.src)
                reads = set(cells if now.type in RECEIVING else cells[k : k + 1])
            stores = event == "go" and now.type in STORING
            return reads, {machine.cells(place, now.dst)[k]} if stores else set()
        except RunError:
            return set(), set()


def file_faults(text, slots, inplace=True, root=0, most=20_000):
    """Return the faults of an MSCCL file: some of "race", "deadlock" and "wrong". ``None``: it has too many states.

    Slots only make threadblocks wait. So races and results are those of connections without a limit.
    """
    try:
        waits, runs = (
            FileState(kind(text, inplace, root=root, slots=number))
            for kind, number in ((Unchecked, slots), (Machine, 10**9))
        )
    except RunError:
        return {"wrong"}
    found = [faults(waits, most), faults(runs, most)]
    if None in found:
        return None
    wrong = "race" not in found[1] and (runs.errors or waits.errors)
    return (found[0] & {"deadlock"}) | (found[1] & {"race"}) | ({"wrong"} if wrong else set())
