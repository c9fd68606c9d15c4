"""Memory that the ranks of a node share while they load: each reads some of the parts, all copy from all of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from muster.trainer.checkpoint.control_group import ControlGroup
from muster.trainer.checkpoint.fetch import CommitReader, FilePart
from muster.trainer.checkpoint.memory import SharedMemory
from muster.words.checkpoint import Commit


class NodeMemory:
    """Whole files side by side, of which only the parts that somebody reads take memory."""

    def __init__(self, memory: SharedMemory, bases: dict[int, int], mine: list[FilePart]) -> None:
        self._memory, self._bases = memory, bases
        self.mine = mine  # the parts that this rank is to read

    def bytes_of(self, file: int, start: int, end: int) -> memoryview:
        base = self._bases[file]
        return memoryview(self._memory.map)[base + start : base + end]

    def jobs(self, reader: CommitReader) -> Iterable[tuple[FilePart, memoryview]]:
        for part in self.mine:
            start, length = reader.bounds(part)
            yield part, self.bytes_of(part.file, start, start + length)


class SharedBuffer:
    """The memory of one rank's load, used again when a commit does not verify and the one before it is loaded."""

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None

    def own(self, size: int) -> SharedMemory:
        if self._memory is None or self._memory.size < size:
            self.close()
            self._memory = SharedMemory.create(size)
        return self._memory

    def of_another(self, pid: int, descriptor: int, size: int) -> SharedMemory | None:
        """Open the memory of another process; None where the kernel does not allow it."""
        self.close()
        try:
            self._memory = SharedMemory.attach(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR), size)
        except OSError:
            return None
        return self._memory

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def share(group: ControlGroup, commit: Commit, needed: Sequence[FilePart], buffer: SharedBuffer) -> NodeMemory:
    """Collective. Divide what the ranks of each node want among them."""
    everyone = group.gather([_node(), os.getpid(), [[part.file, part.index] for part in needed]])
    here = [rank for rank, (node, _, _) in enumerate(everyone) if node == everyone[group.rank][0]]
    parts = sorted({FilePart(file, index) for rank in here for file, index in everyone[rank][2]})
    bases, size = _side_by_side(commit, parts)
    leader = here[0]
    memory = buffer.own(size) if group.rank == leader else None
    descriptors = group.gather(memory.descriptor if memory else None)
    if memory is None:
        memory = buffer.of_another(everyone[leader][1], descriptors[leader], size)
    # Where a rank may not open another's memory (a hardened kernel), each reads for itself.
    alone = group.gather(memory is None)
    if any(alone[rank] for rank in here):
        own = sorted(set(needed))
        buffer.close()
        bases, size = _side_by_side(commit, own)
        return NodeMemory(buffer.own(size), bases, own)
    assert memory is not None
    return NodeMemory(memory, bases, parts[here.index(group.rank) :: len(here)])


def _side_by_side(commit: Commit, parts: Iterable[FilePart]) -> tuple[dict[int, int], int]:
    """Return the offset of each file in the shared memory, where each begins on a page of its own, and the size of all
    in bytes."""
    bases, size = {}, 0
    for file in sorted({part.file for part in parts}):
        bases[file] = size
        size += -(-commit.files[file].bytes // 4096) * 4096
    return bases, size


def _node() -> str:
    """The same for ranks that can share memory: one running kernel, one namespace of processes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"{socket.gethostname()}-{os.getpid()}"
