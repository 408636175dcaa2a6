"""Check that a partitioned model trains like the unpartitioned one: `autoptd.verify`."""
