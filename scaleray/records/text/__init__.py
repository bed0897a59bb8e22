"""Words and tables of records, for every output alike."""
