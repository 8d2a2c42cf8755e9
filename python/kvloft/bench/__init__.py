"""Implements `kvloft bench`, which verifies and measures copies on the user's machine."""
