"""Types for a request's block tables and for the chunks (frame, key and blocks) that a plan copies.
Saves and loads use the same types.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kvloft.seam.ids import BlockId, ChunkKey, Ticket

if TYPE_CHECKING:
    from kvloft._core import ChunkBatch as ChunkBatch
else:  # avoid loading the extension just for a type
    ChunkBatch = Any


class ChunkCopy(NamedTuple):
    """One chunk of a batch.

    ``blocks[i]`` is block ``first_block + i`` of the chunk. For a save, ``first_block`` is 0.
    ``num_blocks`` is the number of blocks in the frame, as recorded in its trailer. If a load
    copies only the end of a chunk, ``blocks`` has fewer than ``num_blocks`` entries.
    """

    frame: int
    key: ChunkKey
    num_blocks: int
    first_block: int
    blocks: tuple[BlockId, ...]
    ticket: Ticket = Ticket(-1)


class Tables:
    """A request's block tables, one per KV cache group.

    ``len`` returns the number of units. Indexing with a slice of units returns blocks of group
    ``main``. ``per_unit`` is the number of blocks per unit for each group, or None if every group
    has one block per unit.
    """

    __slots__ = ("main", "main_size", "main_table", "per_unit", "tables")

    def __init__(
        self,
        tables: Sequence[Sequence[BlockId]],
        main: int = 0,
        per_unit: Sequence[int] | None = None,
    ) -> None:
        self.tables, self.main, self.per_unit = tables, main, per_unit
        self.main_table, self.main_size = tables[main], per_unit[main] if per_unit else 1

    def __len__(self) -> int:
        return len(self.main_table) // self.main_size

    @property
    def has_blocks(self) -> bool:
        """Return True if there are any blocks, even if there are too few for a unit."""
        return bool(self.main_table)

    def __getitem__(self, units: slice) -> Sequence[BlockId]:
        return self.of(self.main, units)

    def size_of(self, group: int) -> int:
        """Return the number of blocks per unit in the given group."""
        return self.per_unit[group] if self.per_unit else 1

    def of(self, group: int, units: slice) -> Sequence[BlockId]:
        """Return a group's blocks for a slice of units. The slice's bounds must not be negative."""
        size = self.size_of(group)
        start, stop = units.start, units.stop
        return self.tables[group][start and start * size : stop and stop * size]

    def copy(self) -> Self:
        """Return a copy whose tables are lists, so that `grow` can extend them."""
        return type(self)([list(table) for table in self.tables], self.main, self.per_unit)

    def grow(self, blocks: Sequence[BlockId]) -> None:
        """Append blocks to the only group's table."""
        self.main_table += blocks  # type: ignore[operator]


NO_TABLES = Tables(((),))
