"""Compilation on the hosts of a fleet: which actor compiles what, and what every host has compiled."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from autotuner.fleet.roster import Gpu
from autotuner.ir.records import Call, Measurement

COMPILERS = 16
"""Calls that an actor is given to compile at once."""

GONE_S = 30.0

Built = tuple[Call, Measurement | None]


class HostCompilation:
    """Calls that every host compiles, for each keeps the code that it times.

    Args:
        hosts: the cores of each that are not needed for timing. A host that comes later compiles while it times.
        tickets: numbers for what is sent.
    """

    def __init__(self, hosts: Mapping[str, int], tickets: Iterable[int]) -> None:
        self._actors = {host: max(1, cores // COMPILERS) for host, cores in hosts.items()}
        self._tickets = iter(tickets)
        self._left: dict[str, Call] = {}
        """By key and in order, the calls that some host has still to compile."""
        self._begun: dict[str, set[str]] = {host: set() for host in hosts}
        """By host, the keys of calls that it compiles or has compiled."""
        self._done: dict[str, set[str]] = defaultdict(set)
        """By key, the hosts that have compiled a call."""
        self._out: dict[int, tuple[Gpu, Sequence[Call]]] = {}
        self._failed: dict[str, Measurement] = {}
        self._missing: dict[str, float] = {}

    @property
    def out(self) -> list[int]:
        """The tickets that are out."""
        return list(self._out)

    @property
    def is_over(self) -> bool:
        return not self._left

    def ask(self, calls: Sequence[Call]) -> None:
        """Have calls compiled in this order, in place of those that wait; those that are being compiled go on."""
        under_way = [call for _, chunk in self._out.values() for call in chunk if call.key in self._left]
        self._left = {call.key: call for call in (*calls, *under_way)}

    def orders(self, gpus: Collection[Gpu], now: float) -> list[tuple[int, Gpu, Sequence[Call]]]:
        """Return what is to be sent now, each with its ticket.

        Args:
            gpus: that take part. A host that has had none for long is given up.
        """
        present = {gpu.host for gpu in gpus}
        self._missing = {host: self._missing.get(host, now) for host in self._begun if host not in present}
        for host in [host for host, since in self._missing.items() if now - since > GONE_S]:
            del self._begun[host]
        found = []
        for gpu in gpus:
            chunk = self._chunk(gpu)
            if chunk:
                ticket = next(self._tickets)
                self._begun[gpu.host].update(call.key for call in chunk)
                self._out[ticket] = gpu, chunk
                found.append((ticket, gpu, chunk))
        return found

    def answered(self, ticket: int, results: Iterable[tuple[str, Measurement | None]]) -> None:
        """Take the answer of an actor: by key None, or why a call cannot be compiled."""
        gpu, chunk = self._out.pop(ticket)
        self._failed |= {key: failure for key, failure in results if failure is not None}
        for call in chunk:
            self._done[call.key].add(gpu.host)

    def lost(self, slot: str) -> None:
        """Have what a lost actor was compiling compiled again."""
        for ticket in [ticket for ticket, (gpu, _) in self._out.items() if gpu.slot == slot]:
            gpu, chunk = self._out.pop(ticket)
            self._begun.get(gpu.host, set()).difference_update(call.key for call in chunk)

    def built(self) -> list[Built]:
        """Return the calls that every host has compiled since this was asked: with None, or with why one has not."""
        keys = [key for key in self._left if self._begun.keys() <= self._done[key]]
        return [(self._left.pop(key), self._failed.get(key)) for key in keys]

    def _chunk(self, gpu: Gpu) -> Sequence[Call]:
        """Return what an actor is to compile now; nothing where its host's cores are busy."""
        at_work = [other.slot for other, _ in self._out.values() if other.host == gpu.host]
        if gpu.host not in self._begun or gpu.slot in at_work or len(at_work) >= self._actors[gpu.host]:
            return ()
        waiting = [call for key, call in self._left.items() if key not in self._begun[gpu.host]]
        return waiting[:COMPILERS]
