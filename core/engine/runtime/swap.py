"""The contents of swapped blocks, on their way to the host and back."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from ..backend.v1 import Array, Session, SwapSession, SwapTicket
from ..errors import BackendError
from ..scheduler import ScheduledStep


@dataclass
class SwapTickets:
    """What a submitted step saves, by sequence, and the fillings that it waits for."""

    exports: dict[int, SwapTicket] = field(default_factory=dict)
    imports: list[SwapTicket] = field(default_factory=list)


class HostBlocks:
    """Sequence id -> contents of its saved blocks. How much there may be is the scheduler's to know."""

    def __init__(self) -> None:
        self._contents: dict[int, Mapping[str, Array]] = {}

    def submit(self, session: Session, step: ScheduledStep) -> SwapTickets:
        """Starts the swaps of a step, before the step itself is submitted."""
        tickets = SwapTickets()
        if not step.swap_outs and not step.swap_ins:
            return tickets
        if not isinstance(session, SwapSession):
            raise BackendError("The session has no export_blocks and import_blocks; preempt by recomputation instead.")
        for swap in step.swap_outs:
            tickets.exports[swap.seq_id] = session.export_blocks(swap.blocks)
        for swap in step.swap_ins:
            tickets.imports.append(session.import_blocks(swap.blocks, self._contents.pop(swap.seq_id)))
        return tickets

    def finish(self, tickets: SwapTickets) -> None:
        """Takes what a step has saved. Raises what a swap has raised."""
        for ticket in tickets.imports:
            ticket.wait()
        for seq_id, ticket in tickets.exports.items():
            self._contents[seq_id] = ticket.wait()

    def keep(self, seq_ids: Set[int]) -> None:
        """Lets go of all but these sequences."""
        for seq_id in self._contents.keys() - seq_ids:
            del self._contents[seq_id]
