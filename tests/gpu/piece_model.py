"""A reference model in Python that executes pieces tile by tile."""

import numpy as np

from kvloft.transfer.cuda.kernels import BlockTiles
from kvloft.transfer.cuda.pieces import ChunkTable, Piece, PieceLimits


def frames_of(piece: Piece) -> list[int]:
    """Return the frames of a piece that consists of complete chunks, in segment order."""
    return [run.frame + row for run in piece.runs for row in range(run.num_rows)]


def gather(
    table: ChunkTable,
    piece: Piece,
    shape: PieceLimits,
    paged: dict[int, np.ndarray],
    slot: np.ndarray,
) -> None:
    """Write the tiles of ``piece`` into ``slot``. ``paged[b]`` is the payload of paged block b."""
    for _, to, block_id, offset, size in _tiles(piece, shape.block_tiles):
        assert block_id >= 0
        slot[to : to + size] = paged[block_id][offset : offset + size]


def copy_out(piece: Piece, shape: PieceLimits, slot: np.ndarray, parts: np.ndarray) -> None:
    """Copy the runs of a save from ``slot`` to ``parts``.

    ``parts`` has the shape [frames, part_bytes]; row f is this rank's shard of frame f.
    """
    for run in piece.runs:
        assert run.part_offset + run.row_bytes <= parts.shape[1], (
            "a run crosses another rank's shard"
        )
        for row in range(run.num_rows):
            at = run.slot_offset + row * piece.slot_stride
            parts[run.frame + row, run.part_offset : run.part_offset + run.row_bytes] = slot[
                at : at + run.row_bytes
            ]
        last = run.frame + run.num_rows - 1
        assert run.frame // shape.frames_per_run == last // shape.frames_per_run, (
            "a run crosses two pieces"
        )


def _tiles(piece: Piece, block_tiles: BlockTiles):
    """Yield (tile, address in the slot, paged block, offset in the block, size) as the kernels
    compute them.
    """
    segments = piece.segments[: piece.num_segments]
    ends = [*segments["first_tile"][1:].tolist(), piece.num_tiles]
    for segment, end in zip(segments, ends, strict=True):
        for tile in range(int(segment["first_tile"]), end):
            chunk_tile = int(segment["chunk_tile"]) + tile - int(segment["first_tile"])
            block, rest = divmod(chunk_tile, block_tiles.tiles_per_block)
            offset = int(block_tiles.tile_offsets[rest])
            after = (
                int(block_tiles.tile_offsets[rest + 1])
                if rest + 1 < block_tiles.tiles_per_block
                else block_tiles.block_bytes
            )
            base = (int(segment["base"]) + block * block_tiles.block_bytes + offset) % 2**64
            yield (
                tile,
                base,
                int(piece.block_ids[int(segment["block_index"]) + block]),
                offset,
                after - offset,
            )
