"""Types of the store. At run time, the types are ``Any`` to avoid importing the extension."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloft._core import KeyChain as KeyChain
    from kvloft._core import ReadLease as ReadLease
    from kvloft._core import Session as Session
else:
    KeyChain = ReadLease = Session = Any
