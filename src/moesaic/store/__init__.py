"""Storage tiers: blocks of equal size in a scratch file, and a cache of them in memory."""
