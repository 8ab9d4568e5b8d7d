"""Weighted means of ranks, on one host and on several: NumPy groups and the torch backend."""

from fractions import Fraction

import numpy as np
import pytest
from exact_cases import terms_of, wide
from exact_oracle import decoded, nearest
from host_checks import joined
from members import array_group
from oracle import dtype_of
from ranks import ranks

from crossreduce.errors import ArgumentError, MismatchError, UnsupportedError
from crossreduce.processes import weighted_mean

WEIGHTS = (64, 0, 7, 3)
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "int16")


def own(rank, dtype, size):
    """Return the array of a rank. That of weight 0 is NaN, if it can be."""
    x = np.random.default_rng(rank).standard_normal(size) * 50
    if not WEIGHTS[rank] and dtype != "int16":
        x[:] = np.nan
    return x.astype(dtype_of(dtype))


class Unreadable:
    """A number that cannot be read, such as a complex tensor of torch."""

    def __float__(self):
        raise RuntimeError("value cannot be converted")


def means(rendezvous):
    """Return the bits of all weighted means of this rank, and the texts of its errors."""
    weighted_mean.PIECE_NBYTES = 1000  # so that small arrays have several pieces
    found, rank = {}, rendezvous.rank
    with array_group(joined(rendezvous)) as group:
        weight = WEIGHTS[rank]
        for dtype in DTYPES:
            for size in (0, 1, 300):
                x = own(rank, dtype, size)
                found[dtype, size, False] = group.all_reduce(x, "mean", weight=weight)
        for dtype in DTYPES[:4]:
            bits = terms_of(wide, 1, dtype, 4, 300)
            x = bits[rank].view(dtype_of(dtype)).copy()
            group.all_reduce(x, "mean", x, exact=True, weight=weight)
            found[dtype, 300, True] = x
        errors = []
        for bad in (-1.0, float("nan"), "3", np.float64(-5), Unreadable()):
            with pytest.raises(ArgumentError) as raised:
                group.all_reduce(np.ones(3), "mean", weight=bad if rank == 2 else 1)
            errors.append(str(raised.value))
        with pytest.raises(ArgumentError) as raised:
            group.all_reduce(np.ones(3), "mean", weight=0)
        errors.append(str(raised.value))
        with pytest.raises(UnsupportedError) as refused:
            group.all_reduce(np.ones(3), "mean", exact=True, weight=(0.1, 0.2, 0.3, 0.4)[rank])
        errors.append(str(refused.value))
        with pytest.raises(MismatchError, match="weighted mean"):
            group.all_reduce(np.ones(3 + (rank == 1)), "mean", weight=1)
        with pytest.raises(ArgumentError, match="only a mean"):
            group.all_reduce(np.ones(3), "sum", weight=1)
        return found, errors, group.all_reduce(np.ones(3), "mean", weight=rank + 1).tolist()


@pytest.mark.parametrize("hosts", ["AAAA", "AABC"])
def test_weighted_means_of_numpy_groups(hosts):
    """All ranks get the same bits: sum(w x) / sum(w) within rounding, or exactly. The array of weight 0 is not used. If
    a weight is invalid, all ranks raise the same error, and the group can still be used."""
    found = ranks(4, means, environment=[{"CROSSREDUCE_HOST": host} for host in hosts])
    results, errors, last = found[0]
    assert last == [1, 1, 1]
    for other, texts, _ in found[1:]:
        assert texts == errors
        assert {key: x.tobytes() for key, x in other.items()} == {key: x.tobytes() for key, x in results.items()}
    assert "-1.0 (float) for rank 2" in errors[0]
    assert all("for rank 2" in text for text in errors[1:5])
    assert "-5.0 (float) for rank 2" in errors[3]
    assert "must not all be 0" in errors[5]
    total = sum(WEIGHTS)
    for dtype in DTYPES:
        for size in (1, 300):
            xs = [own(k, dtype, size).astype("complex128" if dtype == "complex64" else "float64") for k in (0, 2, 3)]
            right = sum(w * x for w, x in zip((64, 7, 3), xs, strict=True)) / total
            got = results[dtype, size, False]
            assert got.dtype == ("float64" if dtype == "int16" else dtype_of(dtype))
            unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 2.0**-20)
            assert (abs(got.astype(right.dtype) - right) <= unit * sum(map(abs, xs))).all()
    for dtype in DTYPES[:4]:
        bits = terms_of(wide, 1, dtype, 4, 300)
        for element, column in zip(results[dtype, 300, True].view(bits.dtype).tolist(), bits.T, strict=True):
            mean = sum(Fraction(w) * decoded(int(x), dtype) for w, x in zip(WEIGHTS, column, strict=True) if w) / total
            sign = (1 << (8 * bits.dtype.itemsize - 1)) if mean < 0 else 0
            assert element == (nearest(abs(mean), dtype) | sign if mean else 0)


def torch_means(rendezvous):
    """Return the weighted means of tensors of one rank, after pending calls."""
    import torch
    import torch.distributed as dist

    import crossreduce.torch

    rank = rendezvous.rank
    store = f"file://{rendezvous.path}.torch"
    dist.init_process_group("crossreduce", store, rank=rank, world_size=rendezvous.size)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.complex64):
        for exact in (False, dtype is not torch.int32):
            x = torch.full((3, 4), float(rank + 1) if WEIGHTS[rank] else 999).to(dtype)[:, ::2]  # not contiguous
            pending = dist.all_reduce(torch.ones(5), async_op=True)
            crossreduce.torch.weighted_mean(x, WEIGHTS[rank], exact=exact)
            pending.wait()
            found.append(x.to(torch.complex128).tolist())
    for value, weight in ((2**63 - 1, rank + 3), (-(2**63), 1), (7, 0.1 * 2**rank)):
        whole = torch.full((2,), value)
        crossreduce.torch.weighted_mean(whole, weight)
        assert whole.tolist() == [value, value]
    leaf = torch.ones(3, requires_grad=True)
    saved = leaf.exp()
    crossreduce.torch.weighted_mean(saved.detach(), 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
    for bad in (-1, float("inf"), torch.tensor(1j)):
        with pytest.raises(ArgumentError, match="for rank 3"):
            crossreduce.torch.weighted_mean(torch.ones(3), bad if rank == 3 else 1)
    with pytest.raises(UnsupportedError, match="cannot be exact"):
        crossreduce.torch.weighted_mean(torch.ones(3, dtype=torch.int8), 1, exact=True)
    with pytest.raises(UnsupportedError, match="needs a CPU tensor"):
        crossreduce.torch.weighted_mean(torch.ones(3, device="meta"), 1)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("hosts", ["AAAA", "AABB"])
def test_weighted_means_of_torch_tensors(hosts):
    """``crossreduce.torch.weighted_mean`` replaces the tensors of all ranks by their weighted mean."""
    found = ranks(4, torch_means, environment=[{"CROSSREDUCE_HOST": host} for host in hosts])
    mean = (64 * 1 + 7 * 3 + 3 * 4) / 74
    assert found[1:] == found[:1] * 3
    units = [2.0**-22, 2.0**-24, 2.0**-8, 2.0**-8, 2.0**-50, 2.0**-52, 1, 1, 2.0**-22, 2.0**-24]
    for rows, unit in zip(found[0], units, strict=True):
        assert all(abs(x - mean) <= unit * mean for row in rows for x in row)
    assert found[0][6] == [[1, 1]] * 3  # integers are truncated
