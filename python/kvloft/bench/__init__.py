"""`kvloft bench`: measures a user's machine, and verifies the moved bytes first."""
