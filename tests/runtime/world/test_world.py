"""Groups, channels and faults, on threads and (at the end) between real processes; `exercise` checks both alike."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoptd.errors import InternalError, PlanError, RuntimeFault
from autoptd.ir.mesh import Mesh
from autoptd.runtime.measure.cover import GROUP_METHODS
from autoptd.runtime.world.processes import DistributedWorld
from autoptd.runtime.world.threads import Ranks, ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, Group, Hops, World, in_place_of, in_rounds, parts_first
from tests.forks import CONTEXT
from tests.ports import free_port
from tests.waits import LONG, wait_until

COMMUNICATORS = Communicators(owners=((0, 1),), links=((0, 1), (1, 0)))


def exercise(world: World) -> None:
    """Use every method of Group and Channel and check its result; the mesh is t=2 p=2, or t=2 p=1."""
    for group in (world.group(("tp",)), world.group(("pp",)), world.owners(range(world.mesh.p))):
        exercise_group(group)
    exercise_hops(world.everyone())
    exercise_hops(world.hops(("tp", "pp")))
    if world.mesh.p == 2:
        exercise_channels(world)


def exercise_group(group: Group) -> None:
    me, size = group.index, group.size
    x = torch.arange(3.0) + 10 * me
    total = group.all_reduce(x, "sum")
    assert total.tolist() == [sum(i + 10 * k for k in range(size)) for i in range(3)]
    assert group.all_reduce(-x, "max", op="max").tolist() == [0, -1, -2]
    gathered = group.all_gather(x, 0, "gather")
    assert gathered.tolist() == [10.0 * k + i for k in range(size) for i in range(3)]
    parts = [torch.tensor([me, k]) for k in range(size)]
    assert group.reduce_scatter(torch.cat(parts), 0, "scatter").tolist() == [sum(range(size)), size * me]
    assert [part.tolist() for part in group.all_to_all(parts, "exchange")] == [[k, me] for k in range(size)]
    assert group.broadcast(x, size - 1, "broadcast").tolist() == [10 * (size - 1) + i for i in range(3)]
    flat, second = torch.ones(4), torch.full((2,), float(me))
    pending = [group.all_reduce_start(flat, "first"), group.all_reduce_start(second, "second")]
    assert pending[1].wait() is second and pending[0].wait() is flat and all(one.is_done() for one in pending)
    assert flat.tolist() == [size] * 4 and second.tolist() == [sum(range(size))] * 2
    started = (
        group.all_gather_start(x, 0, "gather later"),
        group.reduce_scatter_start(torch.cat(parts), 0, "later"),
    )
    assert started[1].wait().tolist() == [sum(range(size)), size * me]
    assert torch.equal(started[0].wait(), gathered)
    exercise_dims(group)
    assert group.gather_objects({"rank": me}, "objects") == [{"rank": k} for k in range(size)]
    flags = group.broadcast(torch.tensor([me == 0]), 0, "flags")
    assert flags.dtype == torch.bool and flags.item()
    for result in (total, gathered):
        result.fill_(-7.0 - me)  # must reach nobody else
    assert group.all_reduce(x, "again").tolist() == [sum(i + 10 * k for k in range(size)) for i in range(3)]


@contextmanager
def alone(group: Group, name: str) -> Iterator[None]:
    """No other public method of the group is called: a record would note that too."""
    others = [one for one in GROUP_METHODS if one != name]
    for one in others:
        setattr(group, one, None)
    try:
        yield
    finally:
        for one in others:
            delattr(group, one)


def exercise_dims(group: Group) -> None:
    """Gathers and reduce-scatters along every dim, of tensors that are contiguous and of others."""
    me, size = group.index, group.size
    for shape in ((2, 4, 6), (1, 1, 4), (1, 4)):
        values = [torch.arange(float(math.prod(shape))).view(shape) * (k + 1) for k in range(size)]
        for dim, mine in (
            (dim, one) for dim in range(len(shape)) for one in (values[me], values[me].mT.clone().mT)
        ):
            for whole in (
                group.all_gather(mine, dim, "gather"),
                group.all_gather_start(mine, dim, "later").wait(),
            ):
                assert torch.equal(whole, torch.cat(values, dim))
            wide = torch.cat([mine] * size, dim)
            part = sum(values).clone()
            assert torch.equal(group.reduce_scatter(wide, dim, "scatter"), part)
            with alone(group, "reduce_scatter_start"):
                assert torch.equal(group.reduce_scatter_start(wide, dim, "later").wait(), part)
            assert torch.equal(mine, values[me])
            # 256 + 1 is no bfloat16: what travels in 16 bits adds up in 32.
            narrow = (torch.ones_like(wide) + 255 * (me == 0)).bfloat16()
            found = group.reduce_scatter_start(narrow, dim, "narrow", torch.float32).wait()
            assert found.dtype == torch.float32
            assert torch.equal(found, torch.full_like(part, 255.0 + size))
    numbers = torch.tensor([1.0 + 2.0j, 3.0j]) * (me + 1)
    total = numbers / (me + 1) * sum(range(1, size + 1))
    assert torch.equal(group.all_reduce(numbers, "complex"), total)
    assert torch.equal(group.all_reduce_start(numbers.clone(), "complex").wait(), total)
    assert torch.equal(group.all_gather(numbers, 0, "complex").view(size, 2)[me], numbers)
    assert group.all_gather(torch.ones(2, 0), 1, "nothing").shape == (2, 0)
    assert group.reduce_scatter(torch.ones(2, 0), 1, "nothing").shape == (2, 0)
    if size > 1:
        with pytest.raises(InternalError, match=rf"dim 0 of \[3, 2\] does not divide into {size} parts"):
            group.reduce_scatter(torch.ones(3, 2), 0, "uneven")


def test_a_gather_along_the_first_dim_that_counts_is_not_copied() -> None:
    for shape, dim in (((4, 3, 2), 0), ((4, 1, 3, 2), 1), ((4, 1, 1, 3), 2)):
        gathered = torch.arange(float(math.prod(shape))).view(shape)
        whole = in_place_of(gathered, dim)
        assert whole.data_ptr() == gathered.data_ptr()
        assert torch.equal(whole, torch.cat(list(gathered), dim))
        assert parts_first(whole, dim, 4, shape[dim + 1]).data_ptr() == gathered.data_ptr()


def exercise_hops(hops: Hops) -> None:
    x = torch.arange(3.0) + 10 * hops.index
    assert hops.all_reduce(x, "sum").tolist() == [sum(i + 10 * k for k in range(hops.size)) for i in range(3)]
    assert hops.all_reduce(-x, "max", op="max").tolist() == [0, -1, -2]
    assert hops.broadcast(x, "start").tolist() == [0, 1, 2]
    assert hops.gather_objects(hops.index, "objects") == list(range(hops.size))
    assert x.tolist() == [10 * hops.index + i for i in range(3)]


def exercise_channels(world: World) -> None:
    peer = (world.rank + 2) % 4
    matrix = torch.arange(6.0).reshape(2, 3).t() + world.rank  # not contiguous
    ids, scalar = torch.tensor([world.rank, 7]), torch.tensor(2.5, dtype=torch.float64)
    likes = [((3, 2), torch.float32), ((2,), torch.int64), ((), torch.float64)]
    received = [world.incoming(peer).receive(like, "receive") for like in (likes, likes[1:], [])]
    sent = [
        world.outgoing(peer).send(message, "send")
        for message in ([matrix, ids, scalar], [ids + 1, scalar], [])
    ]
    first, second, nothing = (one.wait() for one in received)
    for one in sent:
        one.wait()
    assert all(one.is_done() for one in (*sent, *received)) and nothing == []
    assert first[0].tolist() == (torch.arange(6.0).reshape(2, 3).t() + peer).tolist()
    assert first[1].tolist() == [peer, 7] and second[0].tolist() == [peer + 1, 8] and second[1].item() == 2.5
    exercise_departure(world, peer)


def exercise_departure(world: World, peer: int) -> None:
    """What was received has left: the sender learns it, and lets go of it, without waiting."""
    receipt = world.incoming(peer).receive([((70_000,), torch.float32)] * 2, "receive")
    left, right = torch.ones(70_000), torch.ones(140_000)[::2]
    alive = weakref.ref(left)
    sent = world.outgoing(peer).send([left, right], "send")
    del left
    assert sum(map(torch.sum, receipt.wait())) == 140_000
    world.everyone().gather_objects(world.rank, "all have received")
    wait_until(lambda: sent.is_done() and alive() is None)
    sent.wait()


def test_everything_on_threads() -> None:
    run_ranks(ThreadWorld(Mesh(t=2, p=2), COMMUNICATORS, timeout=20.0), exercise)


def test_group_of_one_is_free() -> None:
    world = ThreadWorld(Mesh()).worlds[0]
    x = torch.ones(2)
    for group in (world.group(("dp", "tp")), world.owners((0,))):
        assert group.size == 1 and group.all_reduce(x, "") is x and group.all_reduce_start(x, "").wait() is x
    assert world.everyone().size == 1 and world.everyone().all_reduce(x, "") is x
    exercise_hops(world.everyone())


def test_groups_and_channels_in_one_order() -> None:
    mesh = Mesh(t=2, p=2, d=2)
    communicators = Communicators(owners=((0, 1),), links=((0, 1),))
    assert communicators.groups(mesh) == [
        *[(0, 1), (2, 3), (4, 5), (6, 7)],
        *[(0, 2), (1, 3), (4, 6), (5, 7)],
        *[(0, 4), (1, 5), (2, 6), (3, 7)],
    ]
    assert communicators.channels(mesh) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    world = ThreadWorld(mesh, communicators).worlds[5]
    assert world.group(("tp",)).ranks == (4, 5) and world.owners((0, 1)).index == 1
    with pytest.raises(InternalError, match="not declared"):
        world.group(("pp", "tp"))


@pytest.mark.parametrize("p", [2, 3, 4, 7, 64])
def test_neighbours_connect_in_four_rounds(p: int) -> None:
    """However the links are given: first 0-1, 2-3, ... at once, then 1-2, 3-4, ..., then the same downwards."""
    up, down = [(i, i + 1) for i in range(p - 1)], [(i + 1, i) for i in range(p - 1)]
    order = in_rounds(sorted(up + down))
    assert sorted(order) == sorted(up + down)
    assert order == up[::2] + up[1::2] + down[::2] + down[1::2]
    with_ends = in_rounds([*down, (p - 1, 0), *up, (0, p - 1)])
    assert len(set(with_ends)) == len(with_ends) == 2 * (p - 1) + (2 if p > 2 else 0)


def test_sums_are_in_the_order_of_ranks_and_the_same_bits_on_all() -> None:
    """Of float32 numbers, which another order rounds to other bits: gradients are the same again in every run."""

    def of(rank: int) -> torch.Tensor:
        return torch.randn(4, 1000, generator=torch.Generator().manual_seed(rank))

    def body(world: World) -> list[torch.Tensor]:
        group, x = world.group(("dp",)), of(world.rank)
        scattered = group.reduce_scatter_start(x, 0, "scatter").wait()
        return [group.all_reduce(x, "sum"), group.all_reduce_start(x.clone(), "later").wait(), scattered]

    whole = ((of(0) + of(1)) + of(2)) + of(3)
    assert not torch.equal(whole, of(0) + (of(1) + (of(2) + of(3))))
    for rank, (total, later, part) in enumerate(run_ranks(ThreadWorld(Mesh(d=4), timeout=20.0), body)):
        assert torch.equal(total, whole) and torch.equal(later, whole)
        assert torch.equal(part, whole[rank : rank + 1])


def test_a_sent_tensor_may_change_afterwards() -> None:
    def body(world: World) -> float:
        if world.rank == 1:
            return world.incoming(0).receive([((1,), torch.float32)], "r").wait()[0].item()
        x = torch.ones(1)
        world.outgoing(1).send([x], "s").wait()
        return x.fill_(5.0).item()

    assert run_ranks(ThreadWorld(Mesh(p=2), COMMUNICATORS, timeout=20.0), body) == [5.0, 1.0]


def test_mismatch_names_both_calls() -> None:
    def body(world: World) -> None:
        world.at = f"F0.{world.rank}"
        if world.rank == 0:
            world.group(("tp",)).all_reduce(torch.ones(2), "h.0.mlp")
        else:
            world.group(("tp",)).all_gather(torch.ones(3), 0, "h.0.attn")

    with pytest.raises(RuntimeFault) as caught:
        run_ranks(ThreadWorld(Mesh(t=2), timeout=20.0), body)
    for words in (
        "rank 0 at F0.0",
        "rank 1 at F0.1",
        "all_reduce sum 'h.0.mlp' of [2] float32",
        "'h.0.attn' of [3]",
    ):
        assert words in str(caught.value)


def test_timeout_names_who_waits_and_who_is_missing() -> None:
    leave, shared = threading.Event(), ThreadWorld(Mesh(t=2))

    def body(world: World) -> None:
        world.at = "F1.0" if world.rank == 0 else "B1.3"
        world.everyone().all_reduce(torch.ones(1), "h.1")
        if world.rank == 0:
            # From here on: before, they wait for each other.
            shared.timeout = 0.3
            world.everyone().all_reduce(torch.ones(1), "h.2")
        leave.wait(LONG)

    ranks = Ranks(shared)
    with pytest.raises(RuntimeFault) as caught:
        ranks.run(body)
    for words in (
        "rank 0 at F1.0",
        "all_reduce sum 'h.2'",
        "rank 1 at B1.3",
        "last call: all_reduce sum 'h.1'",
    ):
        assert words in str(caught.value)
    with pytest.raises(RuntimeFault, match="still hang"):
        ranks.run(lambda world: None)
    leave.set()


def test_receive_times_out_and_checks_what_arrives() -> None:
    def silent(world: World) -> None:
        if world.rank == 1:
            world.incoming(0).receive([((1,), torch.float32)], "RECV_F1.0<0").wait()

    with pytest.raises(RuntimeFault, match=r"RECV_F1.0<0' from rank 0; not arrived: rank 0"):
        run_ranks(ThreadWorld(Mesh(p=2), COMMUNICATORS, timeout=0.2), silent)

    def other_shape(world: World) -> None:
        if world.rank == 1:
            world.incoming(0).receive([((1,), torch.float32)], "RECV_F1.0<0").wait()
        else:
            world.outgoing(1).send([torch.ones(2)], "SEND_F0.0>1")

    with pytest.raises(RuntimeFault, match=r"rank 0 sent 'SEND_F0.0>1' as"):
        run_ranks(ThreadWorld(Mesh(p=2), COMMUNICATORS, timeout=20.0), other_shape)


def test_first_fault_is_raised_and_ranks_can_run_again() -> None:
    ranks = Ranks(ThreadWorld(Mesh(t=2, p=2), COMMUNICATORS, timeout=20.0))

    def body(world: World) -> None:
        world.at = "F0.1"
        if world.rank == 3:
            raise PlanError("here", "no", "yes")
        world.everyone().all_reduce(torch.ones(1), "never complete")

    with pytest.raises(PlanError, match="here: no"):
        ranks.run(body)

    def divide(world: World) -> None:
        world.at = "B0.1"
        if world.rank == 1:
            raise ZeroDivisionError("one over zero")
        world.incoming((world.rank + 2) % 4).receive([((), torch.float32)], "never sent").wait()

    with pytest.raises(RuntimeFault, match=r"rank 1 at B0.1: ZeroDivisionError: one over zero") as caught:
        ranks.run(divide)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    for _ in range(3):
        ranks.run(exercise)
    ranks.close()
    with pytest.raises(RuntimeFault, match="has ended them"):
        ranks.run(exercise)


def test_threads_end() -> None:
    before = set(threading.enumerate())  # threads of earlier tests may be about to end
    ranks = Ranks(ThreadWorld(Mesh(t=4)))
    assert ranks.run(lambda world: world.rank) == [0, 1, 2, 3]
    made = set(threading.enumerate()) - before
    assert len(made) == 4
    del ranks  # closes as well
    for thread in made:
        thread.join(2)
    assert not any(thread.is_alive() for thread in made)


def test_ctrl_c_ends_ranks_that_wait_and_those_that_compute_and_they_can_go_on() -> None:
    ranks = Ranks(ThreadWorld(Mesh(t=2)))
    # A shell that starts its jobs in the background has them ignore it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def work(world: World) -> None:
        if world.rank == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            for _ in range(600):
                world.mark()  # the executor's, after each action
                time.sleep(0.05)
        world.group(("tp",)).all_reduce(torch.ones(1), "sum")

    try:
        with pytest.raises(KeyboardInterrupt):
            ranks.run(work)
        assert ranks.run(lambda world: world.group(("tp",)).all_reduce(torch.ones(1), "sum").item()) == [2, 2]
    finally:
        signal.signal(signal.SIGINT, handler)
        ranks.close()


class Interrupted:
    """A rank's jobs, given to it by a caller who presses Ctrl-C just before."""

    def __init__(self, jobs: SimpleQueue[Any]) -> None:
        self.jobs, self.interrupts = jobs, True

    def put(self, job: Any) -> None:
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        self.jobs.put(job)


def test_ctrl_c_before_a_rank_has_its_job() -> None:
    ranks = Ranks(ThreadWorld(Mesh(t=2)))
    ranks._jobs[1] = Interrupted(ranks._jobs[1])

    def work(world: World) -> float:
        return world.group(("tp",)).all_reduce(torch.ones(1), "sum").item()

    with pytest.raises(KeyboardInterrupt):
        ranks.run(work)
    assert ranks.run(work) == [2, 2]
    ranks.close()


# Real processes over gloo. They are forked from a server that has imported torch once.


def _process(
    rank: int, size: int, port: int, body: Callable[[World], None], mesh: Mesh, timeout: float, out: Any
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    world = DistributedWorld(
        mesh, COMMUNICATORS if mesh.p == 2 else Communicators(), timeout=timeout, device="cpu"
    )
    try:
        body(world)
        out.put((rank, "done"))
    except Exception as exc:
        world.report_fault(exc)
        out.put((rank, f"{type(exc).__name__}: {exc}"))
        return
    world.close()


def run_processes(mesh: Mesh, body: Callable[[World], None], timeout: float = 20.0) -> dict[int, str]:
    """Run `body` on one process per rank; return what each said before it ended."""
    return in_processes(mesh.size, _process, mesh.size, free_port(), body, mesh, timeout)


def in_processes(size: int, target: Callable[..., None], *arguments: Any) -> dict[int, str]:
    """Call `target(rank, *arguments, out)` in `size` processes; return what each put into `out`."""
    out = CONTEXT.Queue()
    processes = [CONTEXT.Process(target=target, args=(rank, *arguments, out)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LONG)
        if process.is_alive():
            process.kill()
            pytest.fail("a rank hung")
    said = {}
    while not out.empty():
        rank, text = out.get()
        said[rank] = text
    return said


def kill_one(world: World) -> None:
    world.at = f"F0.{world.rank}"
    world.everyone().all_reduce(torch.ones(1), "first")
    if world.rank == 1:
        wait_until(
            lambda: world.at in (world.board._ask(lambda store: store.get("beat of 1")) or b"").decode()
        )  # type: ignore[attr-defined]
        os.kill(os.getpid(), signal.SIGKILL)
    world.everyone().all_reduce(torch.ones(1), "second")


def raise_on_first(world: World) -> None:
    world.at = "B1.0"
    if world.rank == 0:
        raise ZeroDivisionError("one over zero")
    world.everyone().all_reduce(torch.ones(1), "sum")


def hang_one(world: World) -> None:
    world.at = "F1.2" if world.rank == 1 else "F0.2"
    if world.rank == 1:
        wait_until(lambda: world.board.is_known)  # type: ignore[attr-defined]
    else:
        world.everyone().all_reduce(torch.ones(1), "sum")


@pytest.mark.processes
def test_everything_between_processes() -> None:
    said = run_processes(Mesh(t=2, p=2), exercise)
    assert said == dict.fromkeys(range(4), "done")


@pytest.mark.processes
def test_killed_rank_is_named_by_the_others() -> None:
    said = run_processes(Mesh(t=3), kill_one)
    assert set(said) == {0, 2}
    for text in said.values():
        assert "RuntimeFault" in text and "rank 1 is gone: it was last known at F0.1" in text


@pytest.mark.processes
def test_exception_of_a_peer_is_shown() -> None:
    """Rank 0, which hosts the store, ends first: the others still show its exception."""
    said = run_processes(Mesh(t=3), raise_on_first)
    assert said[0] == "ZeroDivisionError: one over zero"
    for rank in (1, 2):
        assert said[rank].startswith("RuntimeFault: rank 0 at B1.0: ZeroDivisionError: one over zero")


@pytest.mark.processes
def test_hung_rank_is_named_after_the_timeout() -> None:
    said = run_processes(Mesh(t=2), hang_one, timeout=2.0)
    assert "rank 1 is hung or slow: it was last known at F1.2" in said[0] and "all_reduce 'sum'" in said[0]


def _come_or_not(rank: int, port: int, out: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, 3, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    if rank != 1:
        try:
            DistributedWorld(Mesh(t=3), Communicators(), device="cpu", timeout=2.0)
        except Exception as exc:
            out.put((rank, f"{type(exc).__name__}: {exc}"))
        store.set(f"told {rank}", "")
    # Rank 0 hosts the store, and nobody is to be found gone who is not.
    store.wait(["told 0", "told 2"], timedelta(seconds=LONG))
    store.add("left", 1)
    if rank == 0:
        wait_until(lambda: store.add("left", 0) == 3)


@pytest.mark.processes
def test_a_rank_that_does_not_come_is_named() -> None:
    said = in_processes(3, _come_or_not, free_port())
    assert set(said) == {0, 2}
    for rank, text in said.items():
        assert text.startswith(f"RuntimeFault: rank {rank} at start: waited 2 s for rank 1, not arrived"), (
            text
        )


def call_another(world: World) -> None:
    """Gloo ends the process that gets more than it expects."""
    world.at = f"F0.{world.rank}"
    group = world.group(("tp",))
    for _ in range(3):
        group.all_reduce(torch.ones(1), "same")
    group.all_reduce(torch.ones(100 if world.rank else 1), f"call of {world.rank}")


@pytest.mark.processes
def test_ranks_that_make_different_calls_are_both_named() -> None:
    said = run_processes(Mesh(t=2), call_another)
    assert len(said) == 2  # none was aborted
    for text in said.values():
        assert text.startswith("RuntimeFault: ") and " differs: " in text, text
        for rank, size in enumerate((4, 400)):
            assert f"rank {rank} at F0.{rank}: all_reduce 'call of {rank}' of {size} bytes" in text, text


def interrupt_one(world: World, ended: Path) -> None:
    """Rank 1 sees Ctrl-C in a call, and its process lives on until a call of rank 0 that waits for it, out of Python's reach,
    has ended.
    """
    world.at = f"F0.{world.rank}"
    group = world.group(("tp",))
    group.all_reduce(torch.ones(1), "same")
    if world.rank == 1:
        world.report_fault(KeyboardInterrupt())
        until = time.monotonic() + 20.0
        while not ended.exists():
            assert time.monotonic() < until, "the wait of rank 0 does not end while this process lives"
            time.sleep(0.05)
    try:
        group.all_reduce_start(torch.ones(5), "x").wait()
    finally:
        ended.touch()


@pytest.mark.processes
def test_a_wait_for_a_rank_that_was_interrupted_ends_while_that_lives(tmp_path: Path) -> None:
    said = run_processes(Mesh(t=2), partial(interrupt_one, ended=tmp_path / "ended"), timeout=30.0)
    assert said[0].startswith("RuntimeFault: rank 1 at F0.1: left (KeyboardInterrupt) [seen by rank 0"), said
    assert said[1].startswith("RuntimeFault: rank 1 at F0.1: left (KeyboardInterrupt)."), said


@pytest.mark.processes
def test_world_size_must_be_that_of_the_mesh() -> None:
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(PlanError, match="world size 1"):
            DistributedWorld(Mesh(t=2), COMMUNICATORS, device="cpu")
        world = DistributedWorld(Mesh(), Communicators(), device="cpu")  # uses the group that exists
        assert world.everyone().size == 1
        world.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_without_torchrun_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(PlanError, match=r"MASTER_ADDR.*torchrun"):
        DistributedWorld(Mesh(), Communicators(), device="cpu")
