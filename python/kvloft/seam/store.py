"""Store types, which are ``Any`` at run time to avoid importing the extension."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloft._core import KeyChain as KeyChain
    from kvloft._core import ReadLease as ReadLease
    from kvloft._core import Session as Session
else:
    KeyChain = ReadLease = Session = Any
