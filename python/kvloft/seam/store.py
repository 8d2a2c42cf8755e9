"""The store as the scheduler half sees it: types of the extension, described in its stub, which are not loaded at run time."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloft._core import KeyChain as KeyChain
    from kvloft._core import ReadLease as ReadLease
    from kvloft._core import Session as Session
else:
    KeyChain = ReadLease = Session = Any
