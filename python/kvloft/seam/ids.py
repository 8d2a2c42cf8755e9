"""ID types shared by both sides. At run time, IDs are plain ints, strings and bytes."""

from typing import NewType

ReqId = NewType("ReqId", str)
BlockId = NewType("BlockId", int)
ChunkKey = NewType("ChunkKey", bytes)
Ticket = NewType("Ticket", int)
