"""Settings: their table, units of values, the environment, and merged sources."""
