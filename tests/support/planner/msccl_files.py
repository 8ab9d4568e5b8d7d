"""MSCCL XML files for the tests of the verifier, in the styles of several tools."""


def file(coll, chunks, *gpus, **attributes):
    """Return an MSCCL file. A GPU is (scratch chunks, *threadblocks), a threadblock (send, recv, channel, *steps).

    A step is a text such as "rrc i0 o0 2 <1.3 !": type, source, destination and count. "<1.3" means that it waits for
    step 3 of threadblock 1, and "!" that other steps wait for it.
    """
    sizes = {"allgather": (chunks // len(gpus), chunks), "reducescatter": (chunks, chunks // len(gpus))}
    inputs, outputs = sizes.get(coll, (chunks, chunks))
    head = {"name": "custom", "proto": "Simple", "nchannels": 2, "nchunksperloop": chunks, "ngpus": len(gpus)}
    head |= {"coll": coll, "inplace": 1, "outofplace": 0, "minBytes": 0, "maxBytes": 0} | attributes
    lines = ["<algo " + " ".join(f'{key}="{value}"' for key, value in head.items() if value is not None) + ">"]
    for g, (scratch, *blocks) in enumerate(gpus):
        lines.append(f'<gpu id="{g}" i_chunks="{inputs}" o_chunks="{outputs}" s_chunks="{scratch}">')
        for t, (send, recv, channel, *steps) in enumerate(blocks):
            lines.append(f'<tb id="{t}" send="{send}" recv="{recv}" chan="{channel}">')
            for s, step in enumerate(steps):
                kind, src, dst, count, *more = step.split()
                waits = [word[1:].split(".") for word in more if word[0] == "<"] or [("-1", "-1")]
                lines.append(
                    f'<step s="{s}" type="{kind}" srcbuf="{src[0]}" srcoff="{src[1:]}" dstbuf="{dst[0]}" '
                    f'dstoff="{dst[1:]}" cnt="{count}" depid="{waits[0][0]}" deps="{waits[0][1]}" '
                    f'hasdep="{int("!" in more)}"/>'
                )
            lines.append("</tb>")
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"])


def fused_ring(n, **attributes):
    """Return NCCL's own ring. It has one threadblock per GPU, which forwards the messages that it receives."""
    gpus = []
    for g in range(n):
        order = [(g - k) % n for k in range(n)]
        steps = [f"s i{g} i{g} 1"]
        steps += [f"rrs i{c} i{c} 1" for c in order[1 : n - 1]]
        steps += [f"rrcs i{order[n - 1]} i{order[n - 1]} 1"]
        steps += [f"rcs i{c} i{c} 1" for c in order[: n - 2]]
        steps += [f"r i{order[n - 2]} i{order[n - 2]} 1"]
        gpus.append((0, ((g + 1) % n, (g - 1) % n, 0, *steps)))
    return file("allreduce", n, *gpus, **attributes)


def one_step(n, **attributes):
    """Return a file in the style of msccl-tools' allreduce_allpairs and RCCL's allreduce-1step.

    Every GPU sends its buffer to the scratch memory of every other GPU. Then threadblock t adds up chunk t of all
    buffers, after a chain of nops that wait for the other threadblocks.
    """
    gpus = []
    for g in range(n):
        peers = [p for p in range(n) if p != g]
        blocks = []
        for t in range(n):
            only_adds = t == n - 1
            steps = [] if only_adds else [f"s i0 s0 {n} !", f"r i0 s{t * n} {n} !"]
            waits = [f"{u}.{k}" for u in range(n - 1) for k in (0, 1) if u != t]
            steps += [f"nop i-1 o-1 0 <{wait}" for wait in waits[:-1]]
            steps += [f"re s{u * n + t} i{t} 1" + (f" <{waits[-1]}" if u == 0 and waits else "") for u in range(n - 1)]
            peer = -1 if only_adds else peers[t]
            blocks.append((peer, peer, 0, *steps))
        gpus.append(((n - 1) * n, *blocks))
    return file("allreduce", n, *gpus, proto="LL", **attributes)


def apart():
    """Return an exchange of two GPUs with separate threadblocks for sends, receives and additions."""
    adder = (-1, -1, 0, "nop i-1 o-1 0 <0.0", "re s0 i0 2 <1.0")
    gpus = [(2, (1 - g, -1, 0, "s i0 s0 2 !"), (-1, 1 - g, 0, "r i0 s0 2 !"), adder) for g in range(2)]
    return file("allreduce", 2, *gpus)


def pairwise(n):
    """Return an all-to-all: each GPU sends its chunk p to rank p."""
    gpus = []
    for g in range(n):
        exchanges = [(p, p, 0, f"s i{p} o{g} 1", f"r i{p} o{p} 1") for p in range(n) if p != g]
        gpus.append((0, (-1, -1, 0, f"cpy i{g} o{g} 1"), *exchanges))
    return file("alltoall", n, *gpus, inplace=0, outofplace=1)


def two(first, second, coll="allreduce", chunks=1, **attributes):
    """Return a file for two GPUs, each given as (scratch chunks, steps of threadblock 0, of threadblock 1, ...).

    Threadblock 0 sends to the other GPU and receives from it. The other threadblocks have no peer.
    """
    gpus = [
        (scratch, *((1 - g, 1 - g, 0, *steps) if not t else (-1, -1, 0, *steps) for t, steps in enumerate(blocks)))
        for g, (scratch, *blocks) in enumerate((first, second))
    ]
    return file(coll, chunks, *gpus, **attributes)


SWAP = (1, ("s i0 s0 1", "r i0 s0 1", "re s0 i0 1"))  # each GPU sends its input, and adds the input that it receives
LATE = (1, ("s i0 s0 1 !", "r i0 s0 1 !"), ("re s0 i0 1 <0.1",))  # as SWAP, but threadblock 1 adds
