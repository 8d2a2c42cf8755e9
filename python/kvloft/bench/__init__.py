"""Benches that a user can run on their own machine: `kvloft bench`. They verify what they moved
before they print a number.
"""
