"""Ids that both sides share. They are plain ints, strings and bytes at run time."""

from typing import NewType

ReqId = NewType("ReqId", str)
BlockId = NewType("BlockId", int)
ChunkKey = NewType("ChunkKey", bytes)
Ticket = NewType("Ticket", int)
