"""What everything stands on: configuration, errors, events, records, tensor files. No torch."""
