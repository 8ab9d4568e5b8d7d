"""MSCCL++ plans for the tests of the verifier, written in a compact form, in the styles of MSCCL++'s own examples.

Each GPU has a memory channel and a port channel to every other GPU, in the order of ranks, and access to all their
buffers; each threadblock may use all of them.
"""

import json
import re

SPAN = re.compile(r"(?:(\d+)\.)?([iosw])(\d+)(?:\+(\d+))?")
KINDS = ("memory", "port")


def plan(collective, sizes, *gpus, **fields):
    """Return a plan. ``sizes`` are the chunks of the input and of the output. A GPU is (scratch chunks, *threadblocks),
    and a threadblock is a text of operations that are separated by "; ": see ``operations``."""
    ranks = len(gpus)
    semaphores, switch = fields.pop("semaphores", []), fields.pop("switch", "")
    everyone = [{"size": 1, "ranks": list(range(ranks))}]
    made = {"name": "custom", "collective": collective, "protocol": "Simple", "inplace": False}
    made["gpus"] = [
        {
            "id": g,
            "input_chunks": sizes[0],
            "output_chunks": sizes[1],
            "scratch_chunks": scratch,
            "threadblocks": [block(t, ops.split("; "), g, ranks, switch) for t, ops in enumerate(blocks)],
            "channels": [
                *({"channel_type": kind, "connected_to": others(g, ranks)} for kind in KINDS),
                *({"channel_type": "switch", "buffer_type": b, "rank_groups": everyone} for b in switch),
            ],
            "remote_buffers": [
                {"rank": r, "type": b, "access_channel_types": KINDS} for r in others(g, ranks) for b in "ios"
            ],
            "semaphores": [{"init_value": value} for value in semaphores],
        }
        for g, (scratch, *blocks) in enumerate(gpus)
    ]
    return json.dumps(made | fields)


def others(g, ranks):
    return [r for r in range(ranks) if r != g]


def block(number, ops, g, ranks, switch):
    """Return threadblock ``number`` of GPU ``g``, which may use all channels and buffers of the GPU."""
    buffers = list(range(3 * (ranks - 1)))
    ids = list(range(ranks - 1))
    return {
        "id": number,
        "ops": [op for text in ops for op in operations(text, g, ranks)],
        "channels": [
            *({"channel_type": kind, "channel_ids": ids} for kind in KINDS),
            {"channel_type": "switch", "channel_ids": list(range(len(switch)))},
        ],
        "remote_buffer_refs": [{"access_channel_type": kind, "remote_buffer_ids": buffers} for kind in KINDS],
    }


def operations(text, g, ranks):
    """Return the operations of a text: a pipeline "pipeline 32 1 [nop, put i0 > 1.o0]", or one ``operation``."""
    found = re.fullmatch(r"pipeline (\d+) (\d+) \[(.*)\]", text)
    if found is None:
        return [operation(text, g, ranks)] if text else []
    inner = [operation(part, g, ranks) for part in found[3].split(", ")]
    context = {"unit_size": int(found[1]), "num_chunks": int(found[2])}
    return [{"name": "pipeline", "iter_context": context, "ops": inner}]


def operation(text, g, ranks):
    """Return an operation, such as "put i0 i1+2 > 1.s0 2.s0", "signal 0 1" (ranks), "barrier 0 2" or "sem_acquire 0".

    "@" before its name means that it uses port channels. "/1.4" means that it does part 1 of 4. See ``span``.
    """
    words = text.split()
    port, name = words[0].startswith("@"), words[0].removeprefix("@")
    made, kind = {"name": name}, "port" if port else "memory"
    group = [word[1:].split(".") for word in words if word.startswith("/")]
    if group:
        made["tbg_info"] = {"tb_id": int(group[0][0]), "tbg_size": int(group[0][1])}
    words = [word for word in words[1:] if not word.startswith("/")]
    if name in ("signal", "wait", "rlxsignal", "rlxwait", "flush"):
        made |= {"channel_type": kind, "channel_ids": [others(g, ranks).index(int(word)) for word in words]}
    elif name == "barrier":
        made |= {"barrier_id": int(words[0]), "num_threadblocks": int(words[1])}
    elif name.startswith("sem_"):
        made["semaphore_ids"] = [int(word) for word in words]
    elif name != "nop":
        cut = words.index(">")
        spans = [[span(word, g, ranks) for word in part] for part in (words[:cut], words[cut + 1 :])]
        made |= {"src_buff": spans[0], "dst_buff": spans[1], "channel_type": kind}
        if name in ("glres", "gstore", "gstorepkt"):
            made["channel_type"] = "switch"
        if port:
            made["channel_ids"] = [others(g, ranks).index(int(SPAN.fullmatch(word)[1])) for word in words[cut + 1 :]]
    return made


def span(text, g, ranks):
    """Return a range of chunks. "1.s0+2" is chunks 0 and 1 of rank 1's scratch memory, and "w" is a switch's memory."""
    rank, buffer, index, size = SPAN.fullmatch(text).groups()
    place = {"index": int(index), "size": int(size or 1)}
    if buffer == "w":
        return {"switch_channel_id": int(rank or 0), **place}
    if rank is None:
        return {"type": buffer, **place}
    return {"buffer_id": 3 * others(g, ranks).index(int(rank)) + "ios".index(buffer), **place}


def all_ranks(text, n, g):
    """Replace "{p}" in each ";"-separated operation by each other rank in turn, "{P}" by all others, "{g}" by ``g``."""
    made = []
    for part in text.split("; "):
        part = part.replace("{g}", str(g)).replace("{P}", " ".join(map(str, others(g, n))))
        made += [part.replace("{p}", str(p)) for p in others(g, n)] if "{p}" in part else [part]
    return "; ".join(made)


def alike(collective, sizes, n, scratch, *blocks, **fields):
    """Return a plan whose GPUs all run the same texts, in which ``all_ranks`` replaces the ranks."""
    return plan(collective, sizes, *((scratch, *(all_ranks(b, n, g) for b in blocks)) for g in range(n)), **fields)


def packets(n, **fields):
    """Return an all-reduce by packets. All pairs of GPUs exchange their inputs, and each GPU adds them."""
    fields = {"protocol": "LL", "use_double_scratch_buffer": True} | fields
    gpus = []
    for g in range(n):
        received = " ".join(f"s{p}" for p in others(g, n))
        gpus.append((n, all_ranks("ppkt i0 > {p}.s{g}", n, g) + f"; repkt i0 {received} > o0"))
    return plan("allreduce", (1, 1), *gpus, **fields)


def packets_scattered(n, apart=False, **fields):
    """Return an all-reduce by packets in the style of MSCCL++'s allreduce_pkt: reduce-scatter, then all-gather.

    With ``apart``, one threadblock sends, one adds and sends sums, and one unpacks them. The last one overwrites the
    input that the first one sends. It may do so, since the packets that it waits for show that the input was read.
    """
    fields = {"protocol": "LL", "use_double_scratch_buffer": True, "inplace": True} | fields
    gpus = []
    for g in range(n):
        sends = "; ".join(f"ppkt i{p} > {p}.s{g}" for p in others(g, n))
        sources = " ".join(f"s{p}" for p in others(g, n))
        targets = " ".join(f"{p}.s{n + g}" for p in others(g, n))
        unpacks = "; ".join(f"upkt s{n + p} > i{p}" for p in others(g, n))
        blocks = [sends, f"respkt i{g} {sources} > i{g} {targets}", unpacks]
        gpus.append((2 * n, *(blocks if apart else ["; ".join(blocks)])))
    return plan("allreduce", (n, n), *gpus, **fields)


def packets_by_ports(n=2, **fields):
    """Return an all-gather in place by packets: one threadblock packs, one sends by port channels, one unpacks."""
    fields = {"protocol": "LL", "use_double_scratch_buffer": True, "inplace": True} | fields
    gpus = []
    for g in range(n):
        targets = " ".join(f"{p}.s{g}" for p in others(g, n))
        unpacks = "; ".join(f"upkt s{p} > o{p}" for p in others(g, n))
        gpus.append((n, f"cpkt o{g} > s{g}", f"@rppkt s{g} > {targets}", unpacks))
    return plan("allgather", (1, n), *gpus, **fields)


def exchanged(n, **fields):
    """Return an all-reduce in which each GPU reads and adds the inputs of all others. Signals mark begin and end."""
    text = "rlxsignal {P}; rlxwait {P}; nop; rre i0 REMOTE > o0; nop; signal {P}; wait {P}"
    gpus = [(0, all_ranks(text, n, g).replace("REMOTE", " ".join(f"{p}.i0" for p in others(g, n)))) for g in range(n)]
    return plan("allreduce", (1, 1), *gpus, **fields)


def gathered_by_ports(n, put="@put PUTS; @signal {P}", end="@flush {P}", **fields):
    """Return an all-gather on port channels. On each GPU it ends when the GPU's own puts are done."""
    text = f"@signal {{P}}; @wait {{P}}; nop; {put}; copy i0 > o{{g}}; @wait {{P}}; {end}; nop"
    gpus = []
    for g in range(n):
        puts = " ".join("i0" for _ in others(g, n)) + " > " + " ".join(f"{p}.o{g}" for p in others(g, n))
        gpus.append((0, all_ranks(text, n, g).replace("PUTS", puts)))
    return plan("allgather", (1, n), *gpus, **fields)


def pipelined(n=2, unit=64, **fields):
    """Return an all-reduce of two GPUs. One threadblock puts units into scratch memory, and another one adds them."""
    put = "signal {p}; wait {p}; pipeline UNIT 1 [put i0 > {p}.s0, nop, signal {p}]".replace("UNIT", str(unit))
    add = "pipeline UNIT 1 [wait {p}, nop, re i0 s0 > o0, nop]".replace("UNIT", str(unit))
    # Both threadblocks use the channel: one waits before the other one's waits, ordered by the semaphore.
    put = put.replace("wait {p}; pipeline", "wait {p}; nop; sem_release 0; pipeline")
    return alike("allreduce", (1, 1), n, 1, put, "sem_acquire 0; nop; " + add, semaphores=[0], **fields)


def met(n=2, **fields):
    """Return an all-reduce whose two threadblocks copy, meet at a barrier, and each put and add one half."""
    begin = "copy i0 > s0 /{k}.2; barrier 0 2; {sync}barrier 1 2; nop; put s0 > {{p}}.s1 /{j}.2; "
    end = "barrier 0 2; re s0 s1 > o0 /{k}.2; barrier 0 2"
    first = begin.format(k=0, j=1, sync="signal {p}; wait {p}; nop; ") + "barrier 2 2; signal {p}; wait {p}; "
    second = begin.format(k=1, j=0, sync="") + "barrier 2 2; "
    return alike("allreduce", (1, 1), n, 2, *((first + end.format(k=0)), second + end.format(k=1)), **fields)


def switched(n, **fields):
    """Return an all-reduce in place through the switch. Each GPU reduces and stores one chunk."""
    text = "rlxsignal {P}; rlxwait {P}; nop; glres 0.w{g} > 0.w{g}; nop; signal {P}; wait {P}"
    return alike("allreduce", (n, n), n, 0, text, switch="i", inplace=True, **fields)


def stored(n, **fields):
    """Return an all-gather in place through the switch."""
    text = "rlxsignal {P}; rlxwait {P}; nop; gstore o{g} > 0.w{g}; nop; signal {P}; wait {P}"
    return alike("allgather", (1, n), n, 0, text, switch="o", inplace=True, **fields)


def stored_packets(n, **fields):
    """Return an all-gather by packets through the switch, in the style of MSCCL++'s language."""
    text = "cpkt o{g} > s{g}; gstorepkt s{g} > 0.w{g}; upkt s{p} > o{p}"
    fields = {"protocol": "LL", "use_double_scratch_buffer": True} | fields
    return alike("allgather", (1, n), n, n, text, switch="s", inplace=True, **fields)


def all_to_all(n, **fields):
    """Return an all-to-all with puts."""
    gpus = []
    for g in range(n):
        puts = " ".join(f"i{p}" for p in others(g, n)) + " > " + " ".join(f"{p}.o{g}" for p in others(g, n))
        text = f"signal {{P}}; wait {{P}}; nop; put {puts}; copy i{g} > o{g}; nop; signal {{P}}; wait {{P}}"
        gpus.append((0, all_ranks(text, n, g)))
    return plan("alltoall", (n, n), *gpus, **fields)
