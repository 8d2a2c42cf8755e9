"""Types of the store. At run time, they are ``Any``, so that the extension is not imported."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloft._core import KeyChain as KeyChain
    from kvloft._core import ReadLease as ReadLease
    from kvloft._core import Session as Session
else:
    KeyChain = ReadLease = Session = Any
