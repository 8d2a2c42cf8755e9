"""Benches for a user's own machine: `kvloft bench`. They verify the moved bytes before they print a
number.
"""
