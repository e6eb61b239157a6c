"""Collectives on a :class:`Group`: one plain and one asynchronous function each, counted.

``X(x, group, ...)`` returns the result; ``start_X(x, group, ...)`` returns a :class:`Pending` whose ``wait()`` returns
it, and ``x`` must be left alone until then. Every function is collective over ``group``: all its ranks call it, in the
same order. In a group of one nothing is sent or counted and ``x`` itself comes back; everywhere else the result is a
new contiguous tensor, except for ``all_reduce`` and ``broadcast``, which work in place and return ``x``.

Number formats that some backends refuse (fp8, fp4, 16-bit integers, unsigned ones) travel as bytes wherever no
arithmetic is needed; reductions of them are a ``ValueError``. Ranks may hold zero rows.

Shape legend: W ranks in the group, N rows here, ``sizes[r]`` rows of rank r.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.groups import Group
from .wire import ARITHMETIC, from_wire, to_wire

# Newer torch renamed the tensor forms and warns about the old names; older torch has only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Up to this many bytes (all copies together) a CPU all-reduce is one exchange of whole tensors. With gloo on 4 and 8
# ranks one hop takes a third to a half of the time of its own all-reduce up to 256 KiB; beyond, two hops of shares
# beat one and equal gloo's all-reduce, whose order of summation depends on where in the tensor a number lies.
_ONE_HOP_BYTES = 1 << 20
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Pending:
    """A collective in flight. ``wait()`` finishes it and returns the result; later calls return the same again."""

    __slots__ = ("_work", "_result", "_finish", "_keep")

    def __init__(
        self,
        result: Tensor | None,
        work: dist.Work | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
        keep: Tensor | None = None,
    ) -> None:
        self._result, self._work, self._finish, self._keep = result, work, finish, keep

    def wait(self) -> Tensor:
        """The result, once it is complete (on CUDA: once the current stream waits for it)."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._finish is not None:
            self._result, self._finish = self._finish(self._result), None
        self._keep = None
        return self._result


def _native(x: Tensor) -> bool:
    """Whether the backend's own collectives serve ``x`` best: NCCL's do; gloo's are slower than its all-to-all."""
    return x.is_cuda


def _error(op: str, group: Group, message: str) -> ValueError:
    return ValueError(f"{op} on group {group.name} of {group.size}: {message}")


def _check_rows(op: str, group: Group, x: Tensor) -> None:
    if x.dim() == 0:
        raise _error(op, group, "a tensor without dimensions has no rows; give it one with x[None]")


def _check_sizes(op: str, group: Group, name: str, sizes: Sequence[int], rows: int | None) -> None:
    if len(sizes) != group.size:
        raise _error(op, group, f"{name} has {len(sizes)} entries for {group.size} ranks")
    if min(sizes) < 0:
        raise _error(op, group, f"{name} {list(sizes)} has a negative entry")
    if rows is not None and sum(sizes) != rows:
        raise _error(op, group, f"{name} {list(sizes)} add up to {sum(sizes)}, but the tensor has {rows} rows")


def _even_sizes(op: str, group: Group, x: Tensor) -> list[int]:
    if x.shape[0] % group.size:
        raise _error(op, group, f"{x.shape[0]} rows do not divide by {group.size} ranks; {op}_v takes uneven sizes")
    return [x.shape[0] // group.size] * group.size


def _reduce_op(op: str, group: Group, x: Tensor, reduce: str) -> dist.ReduceOp:
    if x.dtype not in ARITHMETIC:
        raise _error(op, group, f"cannot compute {reduce} in {x.dtype}; convert to float32 or int32 first")
    if reduce not in _REDUCE_OPS:
        raise _error(op, group, f"unknown reduction {reduce!r}; there are {', '.join(_REDUCE_OPS)}")
    return _REDUCE_OPS[reduce]


def _count_even(op: str, group: Group, num_bytes: int, sent_to_each: float) -> None:
    remote = len(group.remote_peers)
    group.traffic.add(op, num_bytes, int(sent_to_each * (group.size - 1)), int(sent_to_each * remote))


def _count_pieces(op: str, group: Group, x: Tensor, sizes: Sequence[int]) -> None:
    num_bytes = x.numel() * x.element_size()
    row = num_bytes // x.shape[0] if x.shape[0] else 0
    crossing = sum(sizes[peer] for peer in group.remote_peers)
    group.traffic.add(op, num_bytes, row * (x.shape[0] - sizes[group.rank]), row * crossing)


# --- reductions -------------------------------------------------------------------------------------------------------


def _add_up(pieces: Tensor, reduce: str) -> Tensor:
    """[W, ...] to [...]. Sums run in rank order, 16-bit ones in fp32, whatever the other elements of the tensor are."""
    if reduce != "sum":
        return pieces.amax(0) if reduce == "max" else pieces.amin(0)
    wide = pieces.float() if pieces.dtype in (torch.bfloat16, torch.float16) else pieces
    first, second, *others = wide.unbind(0)
    total = first + second
    for piece in others:
        total += piece
    return total.to(pieces.dtype)


def _all_reduce(x: Tensor, group: Group, reduce: str, async_op: bool) -> Pending:
    op = "all_reduce"
    reduce_op = _reduce_op(op, group, x, reduce)
    if group.size == 1:
        return Pending(x)
    num_bytes = x.numel() * x.element_size()
    if _native(x) or group.size == 2:  # of two numbers there is only one sum
        _count_even(op, group, num_bytes, 2 * num_bytes / group.size)
        wire = x.contiguous()
        return Pending(wire, dist.all_reduce(wire, reduce_op, group.pg, async_op), None if wire is x else x.copy_)
    if num_bytes * group.size <= _ONE_HOP_BYTES:
        _count_even(op, group, num_bytes, num_bytes)
        pieces, work, keep = _to_everyone(x.reshape(1, -1), group, [1] * group.size, async_op)
        return Pending(pieces, work, lambda pieces: x.copy_(_add_up(pieces, reduce).view_as(x)), keep)
    return _all_reduce_two_hops(x, group, reduce, async_op)


def _all_reduce_two_hops(x: Tensor, group: Group, reduce: str, async_op: bool) -> Pending:
    """Each rank adds up one share of the elements and gives it to everyone: the one-hop sums for fewer bytes."""
    flat = x.reshape(-1)
    share, longer = divmod(flat.numel(), group.size)
    sizes = [share + (rank < longer) for rank in range(group.size)]
    item, remote = x.element_size(), len(group.remote_peers)
    mine, remote_shares = sizes[group.rank], sum(sizes[peer] for peer in group.remote_peers)
    sent = flat.numel() - mine + mine * (group.size - 1)
    group.traffic.add("all_reduce", flat.numel() * item, sent * item, (remote_shares + mine * remote) * item)
    pieces = flat.new_empty((group.size, mine))
    work = dist.all_to_all_single(pieces.view(-1), flat, [mine] * group.size, sizes, group.pg, async_op)

    def finish(pieces: Tensor) -> Tensor:
        total, _, _ = _to_everyone(_add_up(pieces, reduce), group, sizes, False)
        return x.copy_(total.view_as(x))

    return Pending(pieces, work, finish, flat)


def all_reduce(x: Tensor, group: Group, reduce: str = "sum") -> Tensor:
    """``x`` (any shape) becomes the sum, max or min over the group, in place, and is returned."""
    return x if group.size == 1 else _all_reduce(x, group, reduce, False).wait()


def start_all_reduce(x: Tensor, group: Group, reduce: str = "sum") -> Pending:
    """Asynchronous :func:`all_reduce`."""
    return _all_reduce(x, group, reduce, True)


def _reduce_scatter(
    op: str, x: Tensor, group: Group, sizes: Sequence[int] | None, reduce: str, async_op: bool
) -> Pending:
    """``sizes`` None: equal pieces."""
    reduce_op = _reduce_op(op, group, x, reduce)
    _check_rows(op, group, x)
    if sizes is None:
        sizes, equal = _even_sizes(op, group, x), True
    else:
        _check_sizes(op, group, "sizes", sizes, x.shape[0])
        sizes, equal = list(sizes), False
    if group.size == 1:
        return Pending(x)
    _count_pieces(op, group, x, sizes)
    wire, mine = x.contiguous(), sizes[group.rank]
    if equal and _native(x):
        out = wire.new_empty((mine, *x.shape[1:]))
        return Pending(out, _reduce_scatter_single(out, wire, reduce_op, group.pg, async_op), keep=wire)
    pieces = wire.new_empty((group.size, mine, *x.shape[1:]))
    work = dist.all_to_all_single(pieces.flatten(0, 1), wire, [mine] * group.size, sizes, group.pg, async_op)
    return Pending(pieces, work, lambda pieces: _add_up(pieces, reduce), wire)


def reduce_scatter(x: Tensor, group: Group, reduce: str = "sum") -> Tensor:
    """[W·N, ...] to [N, ...]: rank r gets the sum (max, min) over the group of rows [r·N, (r+1)·N).

    Raises ``ValueError`` when the rows do not divide by the group's size.
    """
    return _reduce_scatter("reduce_scatter", x, group, None, reduce, False).wait()


def start_reduce_scatter(x: Tensor, group: Group, reduce: str = "sum") -> Pending:
    """Asynchronous :func:`reduce_scatter`."""
    return _reduce_scatter("reduce_scatter", x, group, None, reduce, True)


def reduce_scatter_v(x: Tensor, group: Group, sizes: Sequence[int], reduce: str = "sum") -> Tensor:
    """[sum(sizes), ...] to [sizes[rank], ...]: the r-th run of rows, reduced over the group, goes to rank r.

    ``sizes`` is the same on all ranks. Raises ``ValueError`` when it does not fit the group or ``x``.
    """
    return _reduce_scatter("reduce_scatter_v", x, group, sizes, reduce, False).wait()


def start_reduce_scatter_v(x: Tensor, group: Group, sizes: Sequence[int], reduce: str = "sum") -> Pending:
    """Asynchronous :func:`reduce_scatter_v`."""
    return _reduce_scatter("reduce_scatter_v", x, group, sizes, reduce, True)


# --- moves without arithmetic -----------------------------------------------------------------------------------------


def _to_everyone(
    wire: Tensor, group: Group, sizes: Sequence[int], async_op: bool
) -> tuple[Tensor, dist.Work | None, Tensor]:
    """Every rank's rows of ``wire`` to every rank, by one all-to-all of copies: exact sizes, no padding, and quicker in
    gloo than its own all-gather. Returns the gathered rows, the work, and what must live until it is done."""
    rows = wire.shape[0]
    copies = torch.cat([wire] * group.size)
    out = wire.new_empty((sum(sizes), *wire.shape[1:]))
    return out, dist.all_to_all_single(out, copies, list(sizes), [rows] * group.size, group.pg, async_op), copies


def _all_gather(x: Tensor, group: Group, dim: int, async_op: bool) -> Pending:
    op = "all_gather"
    _check_rows(op, group, x)
    if not -x.dim() <= dim < x.dim():
        raise _error(op, group, f"dim {dim} is outside a tensor of {x.dim()} dimensions")
    if group.size == 1:
        return Pending(x)
    num_bytes = x.numel() * x.element_size()
    _count_even(op, group, num_bytes, num_bytes)
    wire, dim, dtype = to_wire(x), dim % x.dim(), x.dtype
    if _native(x):
        out = wire.new_empty((group.size * wire.shape[0], *wire.shape[1:]))
        work, keep = _all_gather_single(out, wire, group.pg, async_op), wire
    else:
        out, work, keep = _to_everyone(wire, group, [x.shape[0]] * group.size, async_op)

    def finish(out: Tensor) -> Tensor:
        out = from_wire(out, dtype)
        if dim == 0:
            return out
        return out.view(group.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1).contiguous()

    return Pending(out, work, finish, keep)


def all_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """The tensors of all ranks, equal in shape, concatenated in rank order along ``dim``."""
    return x if group.size == 1 else _all_gather(x, group, dim, False).wait()


def all_gather_ints(row: Sequence[int], group: Group, device: torch.device) -> list[list[int]]:
    """The integers of all ranks, equally many, in rank order; they travel on ``device``, as int64."""
    if group.size == 1:
        return [list(row)]
    return all_gather(torch.tensor([row], dtype=torch.int64, device=device), group).tolist()


def start_all_gather(x: Tensor, group: Group, dim: int = 0) -> Pending:
    """Asynchronous :func:`all_gather`."""
    return _all_gather(x, group, dim, True)


def _all_gather_v(x: Tensor, group: Group, sizes: Sequence[int], async_op: bool) -> Pending:
    op = "all_gather_v"
    _check_rows(op, group, x)
    _check_sizes(op, group, "sizes", sizes, None)
    if sizes[group.rank] != x.shape[0]:
        raise _error(op, group, f"sizes promise {sizes[group.rank]} rows of rank {group.rank}, which has {x.shape[0]}")
    if group.size == 1:
        return Pending(x)
    num_bytes = x.numel() * x.element_size()
    _count_even(op, group, num_bytes, num_bytes)
    wire, dtype = to_wire(x), x.dtype
    out, work, keep = _to_everyone(wire, group, sizes, async_op)
    return Pending(out, work, lambda out: from_wire(out, dtype), keep)


def all_gather_v(x: Tensor, group: Group, sizes: Sequence[int]) -> Tensor:
    """[sizes[rank], ...] to [sum(sizes), ...]: the rows of all ranks in rank order.

    ``sizes`` is the same on all ranks. Raises ``ValueError`` when it does not fit the group or ``x``.
    """
    return _all_gather_v(x, group, sizes, False).wait()


def start_all_gather_v(x: Tensor, group: Group, sizes: Sequence[int]) -> Pending:
    """Asynchronous :func:`all_gather_v`."""
    return _all_gather_v(x, group, sizes, True)


def _all_to_all_v(
    op: str,
    x: Tensor,
    group: Group,
    send: Sequence[int],
    receive: Sequence[int],
    async_op: bool,
    buffer: Tensor | None = None,
) -> Pending:
    _check_sizes(op, group, "send_sizes", send, x.shape[0])
    _check_sizes(op, group, "recv_sizes", receive, None)
    if send[group.rank] != receive[group.rank]:
        raise _error(
            op, group, f"rank {group.rank} sends itself {send[group.rank]} rows but expects {receive[group.rank]}"
        )
    if buffer is not None and (buffer.dtype != x.dtype or buffer.shape[0] < sum(receive)):
        raise _error(op, group, f"{sum(receive)} rows of {x.dtype} do not fit {buffer.shape[0]} rows of {buffer.dtype}")
    if group.size == 1:
        return Pending(x)
    _count_pieces(op, group, x, send)
    wire, dtype = to_wire(x), x.dtype
    out = wire.new_empty((sum(receive), *wire.shape[1:])) if buffer is None else to_wire(buffer)[: sum(receive)]
    work = dist.all_to_all_single(out, wire, list(receive), list(send), group.pg, async_op)
    return Pending(out, work, lambda out: from_wire(out, dtype), keep=wire)


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """[W·N, ...] to [W·N, ...]: the r-th run of N rows goes to rank r; received runs are in rank order.

    Raises ``ValueError`` when the rows do not divide by the group's size.
    """
    op = "all_to_all"
    _check_rows(op, group, x)
    sizes = _even_sizes(op, group, x)
    return _all_to_all_v(op, x, group, sizes, sizes, False).wait()


def all_to_all_v(x: Tensor, group: Group, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
    """[sum(send_sizes), ...] to [sum(recv_sizes), ...]: ``send_sizes[r]`` rows go to rank r, in rank order.

    ``recv_sizes[r]`` must be what rank r sends here. Raises ``ValueError`` when sizes do not fit ``x`` or the group.
    """
    _check_rows("all_to_all_v", group, x)
    return _all_to_all_v("all_to_all_v", x, group, send_sizes, recv_sizes, False).wait()


def start_all_to_all_v(
    x: Tensor, group: Group, send_sizes: Sequence[int], recv_sizes: Sequence[int], buffer: Tensor | None = None
) -> Pending:
    """Asynchronous :func:`all_to_all_v`; where anything travels, the result is the first rows of ``buffer``, if given.

    Raises ``ValueError`` when the buffer is of another dtype or has too few rows.
    """
    _check_rows("all_to_all_v", group, x)
    return _all_to_all_v("all_to_all_v", x, group, send_sizes, recv_sizes, True, buffer)


def broadcast(x: Tensor, group: Group, src: int = 0) -> Tensor:
    """``x`` (any shape, equal on all ranks) becomes that of group rank ``src``, in place, and is returned."""
    op = "broadcast"
    if group.size == 1:
        return x
    if not 0 <= src < group.size:
        raise _error(op, group, f"source {src} is not one of the ranks 0..{group.size - 1}")
    num_bytes = x.numel() * x.element_size()
    _count_even(op, group, num_bytes, num_bytes if src == group.rank else 0)
    wire = to_wire(x)
    dist.broadcast(wire, group.ranks[src], group.pg)
    return x if x.is_contiguous() else x.copy_(from_wire(wire, x.dtype))


def barrier(group: Group) -> None:
    """Return once every rank of the group has come here."""
    start_barrier(group).wait()


def start_barrier(group: Group) -> Pending:
    """Asynchronous :func:`barrier`; ``wait()`` returns None."""
    if group.size == 1:
        return Pending(None)
    group.traffic.add("barrier", 0, 0, 0)
    return Pending(None, dist.barrier(group.pg, async_op=True))
