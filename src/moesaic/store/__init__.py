"""Storage tiers: blocks of equal size in scratch or weight files, and a cache of them in memory."""
