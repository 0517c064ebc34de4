"""What happens to blocks between steps: their contents are swapped to the host and back, and memory is mapped to them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from ..backend.v1 import Array, RemapSession, Session, SwapSession, SwapTicket
from ..errors import BackendError
from ..kv import Remap
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
        """Starts the swaps of a step, and maps what it needs, before the step itself is submitted."""
        tickets = SwapTickets()
        for swap in step.swap_outs:
            tickets.exports[swap.seq_id] = _swapping(session).export_blocks(swap.blocks)
        remap(session, step.remaps)
        for swap in step.swap_ins:
            blocks = _swapping(session).import_blocks(swap.blocks, self._contents.pop(swap.seq_id))
            tickets.imports.append(blocks)
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


def remap(session: Session, remaps: tuple[Remap, ...]) -> None:
    """Maps what the step that is submitted next needs; one a cache group, or nothing."""
    if not remaps:
        return
    if not isinstance(session, RemapSession):
        raise BackendError("The session has no remap; choose another KV allocator.")
    session.remap([remap.unmapped for remap in remaps], [remap.mapped for remap in remaps])


def _swapping(session: Session) -> SwapSession:
    if not isinstance(session, SwapSession):
        raise BackendError("The session has no export_blocks and import_blocks; preempt by recomputation instead.")
    return session
