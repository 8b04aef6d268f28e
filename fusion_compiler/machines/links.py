"""Send and receive over links: threads that carry messages, their throttle, and one buffer per message.

A message of an edge is one buffer of bytes whose layout both sides know from the plan. Nothing is pickled.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusion_compiler.machines.compression import Codec, Coder, Part, Prepare
from fusion_compiler.machines.plan import Edge, Link

POLL_S = 0.2  # how often a waiting process looks whether a stage was lost
CLOSE_S = 1.0  # how long to wait for a message that may never come
# a function, the bytes that it sends, when it was submitted, the event that it waits for, and its result
Call = tuple[Callable[[], Any], int, float, torch.cuda.Event | None, Future[None]]


class LinkFailure(Exception):
    """A message could not be sent or received: the process at the other end may be lost."""


class Ticket:
    """A message on its way: `wait` returns when it was sent or received, as that of torch.distributed.Work.

    It calls `check` while it waits, which raises if a stage was lost.
    """

    def __init__(self, result: Future[None], check: Callable[[], None]) -> None:
        self.result, self.check = result, check

    def wait(self) -> None:
        while True:
            try:
                return self.result.result(POLL_S)
            except TimeoutError:
                self.check()
            except RuntimeError as error:
                raise LinkFailure(str(error)) from error


class Lane:
    """A thread that makes calls one after the other: the messages of one process to or from another.

    With a `link`, a call that sends n bytes begins after the time that n bytes take to cross it. Calls queue
    up as messages do on a link. Its latency delays each of them; the latencies of several calls overlap.
    """

    def __init__(self, device: torch.device, check: Callable[[], None], link: Link | None = None) -> None:
        self.device, self.check, self.link = device, check, link
        self.calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def submit(
        self, call: Callable[[], Any], nbytes: int = 0, ready: torch.cuda.Event | None = None
    ) -> Ticket:
        """Make the call when those before it have ended. ready: the call waits for this event of the GPU."""
        result: Future[None] = Future()
        self.calls.put((call, nbytes, time.perf_counter(), ready, result))
        return Ticket(result, self.check)

    def close(self) -> None:
        """End the thread. A process that ends while one is in a call of torch.distributed may abort."""
        self.calls.put(None)
        self.thread.join(CLOSE_S)

    def _run(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread begins with the first GPU
        free_at = 0.0
        while (entry := self.calls.get()) is not None:
            call, nbytes, begin, ready, result = entry
            try:
                if ready is not None and not ready.query():
                    ready.synchronize()
                    begin = time.perf_counter()
                if self.link is not None:
                    free_at = max(free_at, begin) + nbytes / self.link.bytes_per_s
                    time.sleep(max(0.0, free_at + 1e-6 * self.link.latency_us - time.perf_counter()))
                call()
            except Exception as error:
                result.set_exception(error if isinstance(error, RuntimeError) else RuntimeError(str(error)))
            else:
                result.set_result(None)


class Lanes:
    """The messages of a process.

    Over Gloo every message goes through a thread, so that a lost stage never blocks the main thread: a lane
    to each peer, one from a peer for each stage and direction, and one for collectives. A GPU's messages are
    copied to pinned memory of the host and from it, in the order of the stage's kernels. Over NCCL the
    messages are PyTorch's own asynchronous operations.

    throttle: a link that this process imitates when it sends over Gloo.
    """

    def __init__(
        self, device: torch.device, gloo: bool, check: Callable[[], None], throttle: Link | None = None
    ) -> None:
        self.device, self.gloo, self.check, self.throttle = device, gloo, check, throttle
        self.lanes: dict[tuple[object, ...], Lane] = {}
        self.sent: list[Ticket] = []

    def lane(self, *key: object, link: Link | None = None) -> Lane:
        if key not in self.lanes:
            self.lanes[key] = Lane(self.device, self.check, link)
        return self.lanes[key]

    def send(self, tensor: Tensor, rank: int, group: Any, tag: int) -> dist.P2POp:
        """Return the operation that sends a tensor, for a schedule to start and to wait for. Messages to a
        process with the same tag arrive in their order."""
        if not self.gloo:
            return dist.P2POp(dist.isend, tensor, rank, group)
        ready = None
        if self.device.type == "cuda":
            host = self.buffer(tensor.nbytes)
            host.copy_(tensor, non_blocking=True)
            tensor = host
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))
        operation = dist.P2POp(dist.isend, tensor, rank, group)
        call = partial(dist.send, tensor, rank, group, tag)
        operation.op = partial(self._start, rank, call, tensor.nbytes, ready)
        return operation

    def receive(self, nbytes: int, rank: int, group: Any, tag: int) -> tuple[Tensor, dist.P2POp]:
        """Return a buffer, and the operation that receives it. A lane begins at once, and the operation
        waits.

        Gloo sends nothing before the receiver has asked for it, so a late receiver would hold up the sender.
        """
        buffer = self.buffer(nbytes)
        operation = dist.P2POp(dist.irecv, buffer, rank, group)
        if self.gloo:
            ticket = self.lane("from", rank, tag).submit(partial(dist.recv, buffer, rank, group, tag))
            operation.op = lambda *_, **__: ticket
        return buffer, operation

    def buffer(self, nbytes: int) -> Tensor:
        """Return the memory of a message: the host's for Gloo, pinned if there is a GPU, else the GPU's."""
        if not self.gloo:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def finish(self) -> None:
        """Wait until all messages were sent."""
        for ticket in self.sent:
            ticket.wait()
        self.sent.clear()

    def collective(self, call: Callable[[Tensor], Any], tensor: Tensor) -> None:
        """Make a call in which other processes take part, and which writes into the tensor."""
        if not self.gloo:
            call(tensor)
            return
        host = tensor.cpu()  # the tensor itself, if it is there
        self.lane("all").submit(partial(call, host)).wait()
        if host is not tensor:
            tensor.copy_(host)

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()

    def _start(
        self,
        rank: int,
        call: Callable[[], Any],
        nbytes: int,
        ready: torch.cuda.Event | None,
        *_: Any,
        **__: Any,
    ) -> None:
        """Send. Return nothing to wait for: a schedule would wait before the next microbatch."""
        self.sent.append(self.lane("to", rank, link=self.throttle).submit(call, nbytes, ready))


class Packet:
    """The layout of groups of tensors in one buffer of bytes; each tensor begins at a multiple of 16."""

    def __init__(self, groups: Sequence[Sequence[Part]], device: torch.device) -> None:
        self.groups, self.device = groups, device
        self.nbytes = sum(padded(part) for group in groups for part in group)

    def empty(self) -> Tensor:
        return torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)

    def views(self, buffer: Tensor) -> list[tuple[Tensor, ...]]:
        """Return the tensors that lie in a buffer."""
        parts = iter(buffer.split([padded(part) for group in self.groups for part in group]))

        def view(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
            size = torch.Size(shape).numel() * dtype.itemsize
            return next(parts)[:size].view(dtype).view(shape)

        return [tuple(view(*part) for part in group) for group in self.groups]

    def pack(self, groups: Sequence[Sequence[Tensor]]) -> Tensor:
        buffer = self.empty()
        for views, tensors in zip(self.views(buffer), groups, strict=True):
            for view, tensor in zip(views, tensors, strict=True):
                view.copy_(tensor)
        return buffer


def padded(part: Part) -> int:
    dtype, shape = part
    return -(-torch.Size(shape).numel() * dtype.itemsize // 16) * 16


class Wire:
    """Make the messages of an edge from tensors, and tensors from messages, in both directions.

    codec: how tensors with a gradient are compressed, None for not at all. The masks of a microbatch's
        forward message are kept on both sides until its gradient has passed.
    feedback: add what a gradient lost in its message to the gradient of the next microbatch.
    """

    def __init__(
        self, edge: Edge, codec: Codec | None, device: torch.device, prepare: Prepare, feedback: bool
    ) -> None:
        self.edge, self.feedback = edge, feedback and codec is not None
        back = codec and Codec(codec.keep, max(8, codec.bits))
        self.coders, self.back_coders = (
            [Coder(c if t.differentiable else None, t.shape, t.dtype, prepare) for t in edge.tensors]
            for c in (codec, back)
        )
        self.forward = Packet([c.parts + c.mask for c in self.coders], device)
        pairs = zip(self.back_coders, edge.tensors, strict=True)
        self.backward = Packet([c.parts if t.differentiable else [] for c, t in pairs], device)
        self.masks: dict[int, list[tuple[Tensor, ...]]] = {}
        self.lost: dict[int, Tensor] = {}

    def warm_up(self, outgoing: bool) -> None:
        """Compile the encoders and decoders of the edge's source (outgoing), or those of its target."""
        tensors = [torch.zeros(t.shape, dtype=t.dtype, device=self.forward.device) for t in self.edge.tensors]
        if outgoing:
            self.pack_forward(0, tensors)
            self.unpack_backward(0, self.backward.empty().zero_())
        else:
            self.unpack_forward(0, self.forward.empty().zero_())
            self.pack_backward(0, tensors)
        self.lost.clear()

    def pack_forward(self, microbatch: int, tensors: Sequence[Tensor]) -> Tensor:
        pairs = [(c, x.detach()) for c, x in zip(self.coders, tensors, strict=True)]
        masks = self.masks[microbatch] = [(c.select(x),) if c.mask else () for c, x in pairs]
        return self.forward.pack([(*c.encode(x, *m), *m) for (c, x), m in zip(pairs, masks, strict=True)])

    def unpack_forward(self, microbatch: int, buffer: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors; those with a gradient are new leaves."""
        pairs = list(zip(self.coders, self.forward.views(buffer), strict=True))
        masks = self.masks[microbatch] = [parts[len(c.parts) :] for c, parts in pairs]
        decoded = [c.decode(parts[: len(c.parts)], *m) for (c, parts), m in zip(pairs, masks, strict=True)]
        return tuple(
            x.detach().requires_grad_(t.differentiable)
            for x, t in zip(decoded, self.edge.tensors, strict=True)
        )

    def pack_backward(self, microbatch: int, gradients: Sequence[Tensor | None]) -> Tensor:
        sent: list[tuple[Tensor, ...]] = []
        masks = self.masks.pop(microbatch)
        for i, (tensor, gradient) in enumerate(zip(self.edge.tensors, gradients, strict=True)):
            if not tensor.differentiable:
                sent.append(())
                continue
            if gradient is None:
                gradient = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.backward.device)
            if i in self.lost:
                gradient = gradient + self.lost[i]
            sent.append(self.back_coders[i].encode(gradient, *masks[i]))
            if self.feedback:
                self.lost[i] = self.back_coders[i].lost(gradient, sent[i], *masks[i])
        return self.backward.pack(sent)

    def unpack_backward(self, microbatch: int, buffer: Tensor) -> tuple[Tensor | None, ...]:
        rows = zip(self.back_coders, self.backward.views(buffer), self.masks.pop(microbatch), strict=True)
        return tuple(c.decode(parts, *mask) if parts else None for c, parts, mask in rows)
