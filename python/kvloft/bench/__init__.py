"""`kvloft bench`: measures copies on the user's machine, after verifying the copied bytes."""
