"""Whether a partitioned model trains as the one device would: `autoptd.verify`."""
