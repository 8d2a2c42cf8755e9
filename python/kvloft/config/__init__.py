"""Defines settings, parses their values, and merges the sources of settings."""
