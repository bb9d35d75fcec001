"""Tickets: what the forward of an operator in a compiled model leaves for its backward, as a tensor of eight bytes.

A compiled model hands tensors from forward to backward, and nothing else. A ticket's tensor holds a number, and the
tensor's memory is the ticket itself: as long as any tensor over these bytes is there, so is what the ticket holds.
"""

from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from autotuner.runtime.pool import Held

TICKETS: "WeakValueDictionary[int, Ticket]" = WeakValueDictionary()
_numbers = count(1)


def new_number() -> int:
    """Return a number that nothing else in this process has: of a ticket, of what an operator runs, of a place."""
    return next(_numbers)


class Ticket(bytearray):
    """The bytes of a ticket's tensor, which torch keeps alive, and with them what a forward holds for its backward."""

    held: Held

    @classmethod
    def issue(cls, held: Held) -> Tensor:
        """Return the tensor of a new ticket."""
        number = new_number()
        ticket = TICKETS[number] = cls(number.to_bytes(8, "little"))
        ticket.held = held
        return torch.frombuffer(ticket, dtype=torch.int64)

    @staticmethod
    def of(tensor: Tensor) -> "Ticket":
        """Return the ticket that a forward has left as a tensor.

        Raises:
            RuntimeError: the tensor is a copy whose original is gone.
        """
        found = TICKETS.get(int(tensor.item()))
        if found is None:
            raise RuntimeError(
                "what a tuned forward left for its backward is gone: it stays for as long as the tensors that forward "
                "saved, and these were given to backward as copies"
            )
        return found


def like_ticket() -> Tensor:
    """Return an empty tensor like a ticket's, for an operator's fake implementation."""
    return torch.empty(1, dtype=torch.int64, device="cpu")
